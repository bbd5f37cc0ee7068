// Lines from the tokens that look to those they look at, for a part of the text.

import { button, clamp, h, replace, roving } from './dom.js';
import { headColour } from './color.js';
import { largest } from './numbers.js';

const MOST = 200; // tokens on a side
const AT_FIRST = 32;
const LINE = 20; // pixels from token to token
const SIDE = 130;
const WIDTH = 330;
const KEYS = 6; // lines that leave a token, in each head
const LEAST = 0.02;
const HEADS = 8;

export function createArcs(app) {
	const { store, state } = app;
	const canvas = h('canvas', { 'aria-hidden': 'true' });
	const sides = { query: h('div.side', { role: 'group', label: 'Tokens that look' }), key: h('div.side.right', { role: 'group', label: 'Tokens looked at' }) };
	const box = h('div.arcs', canvas, sides.query, sides.key);
	const legend = h('p.note');
	const bound = (i, label) => h('input', { type: 'number', min: 0, label, onchange: (event) => {
		const [first, end] = part().query;
		const typed = Number(event.target.value);
		store.set({ span: i ? [Math.min(first, typed), typed] : [typed, Math.max(end - 1, typed)] });
	} });
	const bounds = [bound(0, 'First token of the part'), bound(1, 'Last token of the part')];
	const settles = Object.values(sides).map((side) => roving(side, () => [...side.children], () => 1));
	let lines = []; // {query, key, weight, head}
	let only = null; // the token whose lines alone are shown: {of, index}

	// The tokens on both sides: [first, end).
	const part = () => {
		const { query_len: many, key_len: keys, cross } = app.layer;
		const start = clamp((state.query ?? 0) - AT_FIRST / 2, 0, Math.max(0, many - AT_FIRST));
		const [a, b] = state.span ?? [start, start + AT_FIRST - 1];
		const first = clamp(Math.floor(a), 0, many - 1);
		const query = [first, clamp(Math.floor(b) + 1, first + 1, Math.min(many, first + MOST))];
		return { query, key: cross || many !== keys ? [0, Math.min(keys, MOST)] : query };
	};
	const draw = () => {
		const { query: queries, key: keys } = part();
		const height = Math.max(queries[1] - queries[0], keys[1] - keys[0]) * LINE + 8;
		const ratio = Math.min(devicePixelRatio, 16000 / height);
		Object.assign(canvas, { width: WIDTH * ratio, height: height * ratio });
		Object.assign(canvas.style, { width: `${WIDTH}px`, height: `${height}px` });
		box.style.height = `${Math.min(480, height + 4)}px`;
		const context = canvas.getContext('2d');
		context.scale(ratio, ratio);
		context.lineCap = 'round';
		const several = lines.some((line) => line.head > 0);
		for (const line of lines) {
			const [from, to] = [4 + (line.query - queries[0] + 0.5) * LINE, 4 + (line.key - keys[0] + 0.5) * LINE];
			context.globalAlpha = !only || line[only.of] === only.index ? 0.15 + 0.8 * Math.sqrt(line.weight) : 0.04;
			context.lineWidth = 0.5 + 4 * line.weight;
			context.strokeStyle = several ? headColour(line.head, app.dark) : app.colours.weight;
			context.beginPath();
			context.moveTo(SIDE, from);
			context.bezierCurveTo(SIDE + 35, from, WIDTH - SIDE - 35, to, WIDTH - SIDE, to);
			context.stroke();
		}
	};
	const mark = () => {
		for (const [of, side] of Object.entries(sides)) [...side.children].forEach((one) => one.setAttribute('aria-pressed', Number(one.dataset.at) === state[of]));
	};
	const load = app.latest(async (signal, heads) => {
		const shown = heads.slice(0, HEADS);
		const { query: queries, key: keys } = part();
		const [{ meta, data }] = await Promise.all([app.call('sel', { heads: shown, queries, keys }, signal), app.tokens('query').range(...queries), app.tokens('key').range(...keys)]);
		if (signal.aborted) return;
		lines = [];
		for (let at = 0; at < shown.length * meta.rows; at++) {
			const weights = new Float32Array(data, at * meta.columns * 4, meta.columns);
			const best = largest(weights, KEYS, state.hide && keys[0] === 0 ? 1 : 0);
			for (const c of best.filter((key) => weights[key] >= LEAST)) lines.push({ query: queries[0] + (at % meta.rows), key: keys[0] + c, weight: weights[c], head: Math.floor(at / meta.rows) });
		}
		for (const [of, [first, end]] of Object.entries(part())) {
			const tokens = Array.from({ length: end - first }, (_, i) => {
				const index = first + i;
				const alone = (on) => () => {
					only = on ? { of, index } : null;
					draw();
				};
				const label = app.tokens(of).label(index);
				return button(label, () => app.choose({ [of]: index }), { label: `${label}, token ${index}`, tabindex: -1, data: { at: index }, onmouseenter: alone(true), onmouseleave: alone(false), onfocus: alone(true), onblur: alone(false) });
			});
			replace(sides[of], tokens);
		}
		for (const settle of settles) settle();
		bounds.forEach((one, i) => (one.value = queries[i] - i));
		const names = shown.map(([l, n], i) => [' ', shown.length > 1 && h('span.swatch', { style: { background: headColour(i, app.dark) } }), ` ${l}.${n}`]);
		replace(legend, 'Heads:', names, heads.length > HEADS && ` (the first ${HEADS} of ${heads.length})`, `. The ${KEYS} largest weights of each token, from ${LEAST} up.`);
		mark();
		draw();
	}, () => {
		lines = [];
		draw();
	});
	const element = h('div', h('div.tools', h('label.field', 'tokens', bounds[0]), h('label.field', 'to', bounds[1])),
		h('p.note', 'Lines run from a token at the left to the tokens it looks at; thicker is more. Point at a token, or move to it by keyboard, to see its lines alone.'), box, legend);
	return {
		element,
		update(changed, heads) {
			element.hidden = !state.arcs;
			if (!state.arcs) return;
			if (changed.any('run', 'layer', 'head', 'heads', 'set', 'arcs', 'span', 'hide') || (!state.span && changed.has('query'))) load(heads());
			else if (changed.has('theme')) draw();
			mark();
		},
	};
}
