// Two heads side by side, and how differently they look, token by token.

import { choice, h, replace } from './dom.js';
import { number } from './numbers.js';
import { paintCurve } from './scene.js';
import { TILE } from './tiles.js';
import { paintThumb } from './heads.js';

const MEANINGS = {
	divergence: 'Jensen–Shannon divergence in nats: 0 for the same weights, 0.693 for nothing in common',
	variation: 'the share of the weight that would have to move: 0 to 1',
	cosine: 'cosine of the two rows of weights: 1 for the same direction, 0 for nothing in common',
};

export function createCompare(app) {
	const { store, state } = app;
	const other = choice('Compare with', [], '', (value) => store.set({ other: value ? [value] : [] }));
	const body = h('div');
	const said = h('p.note', { role: 'status' });

	const picture = async ([layer, head], signal) => {
		const { query_len: queries, key_len: keys, levels } = app.info.layers[layer];
		const { data } = await app.call('tile', { layer, head, level: levels - 1, row: 0, column: 0, pool: 'max' }, signal);
		const canvas = h('canvas.square', { role: 'img', label: `Map of layer ${layer}, head ${head}` });
		const cells = (length) => Math.ceil(length / 2 ** (levels - 1));
		paintThumb(canvas, { codes: new Uint16Array(data), rows: cells(queries), columns: cells(keys), wide: TILE }, app.dark);
		const about = app.summary(layer, head);
		return h('div', h('h3', `Layer ${layer}, head ${head}`), h('p.tag', about ? `${about.kind} · entropy ${number(about.entropy)} nats` : ''), canvas);
	};
	const curve = (values, name) => {
		const canvas = h('canvas.curve', { width: 900, height: 90, role: 'img', label: `${name}, token by token` });
		const context = canvas.getContext('2d');
		context.fillStyle = app.colours.sunk;
		context.fillRect(0, 0, canvas.width, canvas.height);
		context.fillStyle = app.colours.curve;
		paintCurve(context, values, 0, canvas.width / values.length, canvas.width, canvas.height - 6, (x, from, size) => context.rect(x, canvas.height - from - size, 1, size));
		return h('div', h('h3', name), h('p.tag', `${MEANINGS[name]}; the highest here is ${number(values.reduce((most, value) => Math.max(most, value)))}`), canvas);
	};
	const load = app.latest(async (signal) => {
		const b = (state.other[0] ?? '').split('.').map(Number);
		if (!app.alike(...b)) {
			said.textContent = 'Choose a second head above.';
			return void replace(body);
		}
		const a = [state.layer, state.head];
		said.textContent = 'Comparing…';
		let { meta, data } = await app.call('compare', { a, b }, signal);
		if (!meta.ready) {
			await app.follow(meta.job, null, signal);
			({ meta, data } = await app.call('compare', { a, b }, signal));
		}
		const pictures = await Promise.all([picture(a, signal), picture(b, signal)]);
		replace(said, 'Mean over all tokens: ', meta.names.map((name, i) => [i ? ' · ' : '', name, ' ', h('b', { data: { distance: name, value: meta.means[i] } }, number(meta.means[i]))]));
		replace(body, h('div.cols', pictures), meta.names.map((name, i) => curve(new Float32Array(data, 4 * i * meta.query_len, meta.query_len), name)));
	}, () => {
		said.replaceChildren();
		body.replaceChildren();
	});
	return {
		element: h('div', h('p.about', 'Two heads side by side, and how far apart they look: the curves show it for each token.'), h('div.tools', other.element), said, body),
		update(changed) {
			if (changed.any('run', 'layer', 'head', 'summary', 'tab', 'other')) {
				const heads = app.alikeHeads().filter(([l, n]) => l !== state.layer || n !== state.head);
				other.set([['', 'choose a head'], ...heads.map(([l, n]) => [`${l}.${n}`, `layer ${l}, head ${n}${app.summary(l, n) ? `: ${app.summary(l, n).kind}` : ''}`])], state.other[0] ?? '');
			}
			if (changed.any('run', 'layer', 'head', 'other', 'theme', 'tab')) load();
		},
	};
}
