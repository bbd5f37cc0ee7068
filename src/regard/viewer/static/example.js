// Attention on three tokens, small enough to check by hand. Every number can be changed, and every step follows.

import { button, checkbox, h, replace } from './dom.js';
import { number } from './numbers.js';
import { stepItem } from './steps.js';

const WAIT = 120; // ms after the last key
const INPUTS = { x: 'x: a row per token', query: 'query matrix', key: 'key matrix', value: 'value matrix' };

export function createExample(app) {
	const inputs = h('div.grids');
	const body = h('div');
	let given = null;
	let timer = 0;
	const causal = checkbox('Causal: no token looks ahead', () => ask());
	const reset = button('Start again', () => {
		given = null;
		ask();
	});
	// Rows of cells: write(value, row, column) makes one.
	const grid = (rows, labels, write, caption) => h('table', caption && h('caption', caption), h('tbody', rows.map((cells, r) => h('tr', labels?.length === rows.length && h('th', { scope: 'row' }, labels[r]), cells.map((value, c) => write(value, r, c))))));
	const field = (name) => (value, r, c) => h('td', h('input', { type: 'number', step: 'any', value, label: `${name}, row ${r}, column ${c}`, oninput: ({ target }) => {
		const typed = target.valueAsNumber;
		target.setAttribute('aria-invalid', !Number.isFinite(typed));
		if (!Number.isFinite(typed)) return;
		given[name][r][c] = typed;
		clearTimeout(timer);
		timer = setTimeout(ask, WAIT);
	} }));
	const numbers = (values, labels, step) => {
		if (Array.isArray(values[0]?.[0])) return values.map((one) => numbers(one, labels, step));
		return grid(Array.isArray(values[0]) ? values : [values], labels, (value) => h('td', { data: { step, value: value ?? '-inf' } }, number(value ?? -Infinity, 4)));
	};
	const ask = app.latest(async (signal) => {
		const { meta } = await app.call('example', given ? { ...given, causal: causal.input.checked } : {}, signal);
		if (!given) {
			given = { x: meta.x, query: meta.query, key: meta.key, value: meta.value };
			causal.input.checked = meta.causal;
			replace(inputs, Object.keys(INPUTS).map((name) => grid(given[name], name === 'x' && meta.tokens, field(name), INPUTS[name])));
		}
		replace(body, h('ol.steps', meta.steps.map((step) => stepItem(step, '', h('div.grids.scroll', numbers(step.numbers, meta.tokens, step.name))))));
	});
	return {
		element: h('div', h('p.about', 'Attention on three tokens, small enough to check by hand: change any number, and every step follows.'), h('div.tools', causal.element, reset), inputs, body),
		update() {
			if (!given) ask();
		},
	};
}
