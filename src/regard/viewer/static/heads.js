// All heads as small pictures: a row for each layer, or sorted and filtered by what they do.

import { choice, h, replace, roving } from './dom.js';
import { CODES, number, percent } from './numbers.js';
import { painter, rangeOf } from './color.js';

const SIZE = 64;

// Draws codes into a canvas, in the range that fits them.
export function paintThumb(canvas, { codes, rows, columns, wide = columns }, dark) {
	const histogram = new Float64Array(1024);
	for (const code of codes) if (code) histogram[code >> 6]++;
	const range = rangeOf(histogram) ?? { low: 1, high: CODES - 1 };
	const paint = painter({ map: 'weight', dark, ...range, log: true });
	Object.assign(canvas, { width: columns, height: rows });
	const context = canvas.getContext('2d');
	const image = context.createImageData(columns, rows);
	const target = new Uint32Array(image.data.buffer);
	for (let i = 0; i < target.length; i++) target[i] = paint(codes[Math.floor(i / columns) * wide + (i % columns)]);
	context.putImageData(image, 0, 0);
}

export function createHeads(app) {
	const { store, state } = app;
	const grid = h('div.heads-grid', { role: 'group', label: 'Heads' });
	const note = h('p.note');
	const thumbs = new Map(); // "layer.head" -> {layer, head, element, canvas, small, picture}
	let sampled = null;
	let shape = null;
	let wide = 1;
	const settle = roving(grid, () => [...grid.querySelectorAll('.thumb')], () => wide);
	const order = choice('Order', [['layer', 'by layer'], ['score', 'most typical first'], ['entropy', 'widest look first'], ['distance', 'farthest look first']], 'layer', store.put('sort'));
	const kind = choice('Kind', [], '', store.put('kind'));

	const paint = ({ canvas, picture }) => picture && paintThumb(canvas, picture, app.dark);
	const make = (layer, head) => {
		const canvas = h('canvas', { width: SIZE, height: SIZE, 'aria-hidden': 'true' });
		const small = h('small');
		const press = (event) => {
			if (!event.ctrlKey && !event.metaKey) return store.set({ layer, head });
			const name = `${layer}.${head}`;
			return store.set({ heads: 'set', set: state.set.includes(name) ? state.set.filter((one) => one !== name) : [...state.set, name] });
		};
		const { group } = app.info.layers[layer];
		const element = h(`button.thumb${group > 1 && head % group === 0 ? '.group-start' : ''}`, { type: 'button', tabindex: -1, onclick: press, data: { head: `${layer}.${head}` } }, canvas, small);
		thumbs.set(`${layer}.${head}`, { layer, head, element, canvas, small, picture: null });
	};
	const arrange = () => {
		const byLayer = state.sort === 'layer' && !state.kind;
		const about = ({ layer, head }) => app.summary(layer, head);
		let list = [...thumbs.values()].filter((one) => !state.kind || about(one)?.kind === state.kind);
		if (state.sort !== 'layer') list = list.sort((a, b) => (about(b)?.[state.sort] ?? 0) - (about(a)?.[state.sort] ?? 0));
		const most = Math.max(...app.info.layers.map((layer) => layer.heads.length));
		const noted = app.info.layers.map((layer) => layer.traits.join(', '));
		const beside = byLayer && most <= 8 && !noted.some(Boolean); // layers' numbers stand beside their rows
		wide = byLayer ? Math.min(most, 8) : 4;
		grid.style.gridTemplateColumns = `${beside ? '16px ' : ''}repeat(${wide}, minmax(${byLayer ? 24 : 44}px, 1fr))`;
		const cells = [];
		list.forEach((one, i) => {
			const first = byLayer && one.layer !== list[i - 1]?.layer;
			const words = beside ? one.layer : `layer ${one.layer}${noted[one.layer] ? `: ${noted[one.layer]}` : ''}`;
			if (first) cells.push(h(`span.row-name${beside ? '' : '.wide'}`, { title: app.info.layers[one.layer].name, style: beside ? { 'grid-column-start': 1 } : {} }, words));
			one.element.style.gridColumnStart = first && !beside ? 1 : '';
			one.small.hidden = byLayer;
			cells.push(one.element);
		});
		replace(grid, cells.length ? cells : h('p.empty', 'No head is of this kind.'));
		settle();
		mark();
	};
	const mark = () => {
		for (const { layer, head, element, small } of thumbs.values()) {
			const about = app.summary(layer, head);
			const off = state.changes.some((one) => one.layer === layer && one.head === head && one.what === 'o');
			const told = about ? `: ${about.kind} ${percent(about.score)}` : '';
			const now = layer === state.layer && head === state.head;
			element.setAttribute('aria-pressed', now);
			if (!grid.contains(document.activeElement)) element.tabIndex = now ? 0 : -1;
			element.classList.toggle('off', off);
			const named = `Layer ${layer}, head ${head}${told}`;
			element.setAttribute('aria-label', named + (off ? ', switched off' : ''));
			element.title = `${named}${about ? `\nentropy ${number(about.entropy)} nats, distance ${number(about.distance)} tokens` : ''}`;
			const value = about && state.sort !== 'layer' ? (state.sort === 'score' ? percent : number)(about[state.sort]) : '';
			small.textContent = `${layer}.${head}\n${value}`;
		}
		settle();
	};
	const tell = () => {
		const sampling = sampled ? `Small pictures show ${sampled} of the tokens in each row of pixels; opened maps are exact. ` : '';
		note.textContent = sampling + (app.summaries.complete ? '' : 'Kinds and scores are being worked out…');
		note.hidden = !note.textContent;
	};
	const load = app.latest(async (signal) => {
		sampled = null;
		await Promise.all(app.info.layers.map(async (_, layer) => {
			const { meta, data } = await app.call('thumbs', { layer, size: SIZE }, signal);
			const { rows, columns } = meta;
			if (!meta.exact) sampled = meta.sampled;
			meta.heads.forEach((head, i) => {
				const one = thumbs.get(`${layer}.${head}`);
				one.picture = { codes: new Uint16Array(data).subarray(i * rows * columns, (i + 1) * rows * columns), rows, columns };
				paint(one);
			});
		}));
		tell();
	});
	const kinds = () => {
		const { heads, kinds: names } = app.summaries;
		kind.set([['', 'all kinds'], ...names.map((name) => [name, `${name} (${heads.filter((one) => one.kind === name).length})`])], state.kind);
	};
	return {
		element: h('section.panel.heads-panel', { 'aria-labelledby': 'heads-title' },
			h('h2', { id: 'heads-title' }, 'Heads'),
			h('p.about', 'Each square is one attention head of the model, a row per layer: inside, rows are the tokens that look, columns what they look at. Choose one to open it.'),
			h('div.tools', order.element, kind.element), note, grid),
		update(changed) {
			if (changed.has('run')) {
				const now = JSON.stringify(app.info.layers.map((layer) => [layer.name, layer.heads]));
				if (now !== shape) {
					shape = now;
					thumbs.clear();
					app.info.layers.forEach((layer, i) => layer.heads.forEach((head) => make(i, head)));
				}
				load();
			}
			if (changed.any('run', 'summary')) kinds();
			if (changed.any('run', 'summary', 'sort', 'kind')) arrange();
			else if (changed.any('layer', 'head', 'changes')) mark();
			if (changed.has('theme')) thumbs.forEach(paint);
			if (changed.has('summary')) tell();
			order.select.value = state.sort;
			kind.select.value = state.kind;
		},
	};
}
