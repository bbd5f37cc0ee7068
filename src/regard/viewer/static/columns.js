// Where every head looks from one token: a row for each token looked at, a column for each head.

import { choice, h, replace, row, table, token } from './dom.js';
import { heat } from './color.js';
import { largest, number } from './numbers.js';

const ROWS = 24;
const COLUMNS = 64;
const LEAST = 0.005;

export function createColumns(app) {
	const { state } = app;
	const scope = choice('Heads', [['all', 'all layers'], ['layer', 'this layer'], ['set', 'the set of the text panel']], 'all', () => load());
	const said = h('p.note', { role: 'status' });
	const body = h('div');
	const load = app.latest(async (signal) => {
		const { query } = state;
		if (query === null) {
			said.textContent = 'Choose a token in the map or in the text.';
			return void replace(body);
		}
		const wanted = { all: app.alikeHeads, layer: () => app.alikeHeads().filter(([layer]) => layer === state.layer), set: app.setHeads }[scope.select.value]();
		const heads = wanted.slice(0, COLUMNS);
		if (!heads.length) return void (said.textContent = 'No heads are in the set: name some in the text panel.');
		const { meta, data } = await app.call('row', { heads, query }, signal);
		const values = new Float32Array(data);
		const most = new Float32Array(meta.key_len);
		values.forEach((value, i) => (most[i % meta.key_len] = Math.max(most[i % meta.key_len], value)));
		const keys = largest(most, ROWS, state.hide ? 1 : 0).sort((a, b) => a - b);
		const [[label], labels] = await Promise.all([app.tokens('query').labelled(query), app.tokens('key').labelled(...keys)]);
		if (signal.aborted) return;
		const cell = (key, i) => ([l, n], head) => {
			const weight = values[head * meta.key_len + key];
			const [background, color] = weight >= 2 * LEAST ? heat(weight, app.dark) : ['', ''];
			return h('td', { style: { background, color }, title: `layer ${l}, head ${n}, ${labels[i]}: ${number(weight)}` }, weight >= LEAST ? weight.toFixed(2).replace(/^0/, '') : '');
		};
		const rows = keys.map((key, i) => row([`${key} `, token(labels[i])], heads.map(cell(key, i)), { class: key === state.key && 'chosen' }));
		replace(said, 'From ', token(label, query), `, the ${keys.length} tokens that any of the heads looks at most. Weights below ${LEAST} are left blank.`, wanted.length > COLUMNS ? ` The first ${COLUMNS} of ${wanted.length} heads.` : '');
		replace(body, table('Weights, head by head', ['token looked at', ...heads.map((one) => one.join('.'))], rows));
	}, () => {
		said.replaceChildren();
		body.replaceChildren();
	});
	return {
		element: h('div', h('p.about', 'One row per token, one column per head: compare where the heads look from the chosen token.'), h('div.tools', scope.element), said, body),
		update(changed) {
			if (changed.any('run', 'query', 'key', 'layer', 'set', 'hide', 'theme', 'tab')) load();
		},
	};
}
