// How one token's output comes about in one head, step by step, with the model's own numbers.

import { button, h, meter, replace, row, table, token } from './dom.js';
import { number, percent, plural } from './numbers.js';

const SHOWN = 12; // numbers of a vector before it is cut
const TERMS = 4;
const PARTS = 6; // numbers of a value that the running sum shows
const COLUMNS = { score: 'q · k', scale: '× scale', cap: 'capped', bias: '+ bias', mask: 'masked', exp: 'e^(score − largest)', softmax: 'weight' };

function vector(values) {
	const box = h('div.vector');
	const write = (many) => {
		const more = values.length - many;
		replace(box, `[${values.slice(0, many).map((value) => number(value, 4)).join('  ')}`, more > 0 ? ['  … ', button(`${more} more`, () => write(values.length), { class: 'plain' })] : ']');
	};
	write(values.length <= SHOWN + 2 ? values.length : SHOWN);
	return box;
}

export function stepItem({ name, formula, note }, of, ...body) {
	const words = /[@*/(=]/.test(formula) ? h('code.formula', formula) : h('span.tag', formula);
	return h('li', h('div', h('div.step-line', h('b', name, of), words, note && h('span.tag', note)), body));
}

export function createSteps(app) {
	const { state } = app;
	const title = h('h3');
	const body = h('div');
	const count = h('input', { type: 'number', min: 1, max: 256, value: 16, onchange: () => load() });

	const scores = (meta, at) => {
		const columns = Object.keys(COLUMNS).filter((name) => meta.table[name]);
		const rows = meta.keys.map(({ key, label, hidden }, i) => {
			const cells = columns.map((name) => {
				const value = meta.table[name][i] ?? -Infinity;
				return h('td', { data: { step: name, value } }, name === 'softmax' ? [number(value), meter(value)] : number(value, 4));
			});
			const choose = button(token(label), () => app.choose({ query: meta.query, key }), { class: 'plain', label: `${label}, token ${key}` });
			return row([`${key} `, choose, hidden ? ' hidden' : ''], cells, { class: i === at && 'chosen' });
		});
		const sink = meta.sink > 0 ? `, the sink ${percent(meta.sink)}` : '';
		return [table('Scores and weights, key by key', ['key', ...columns.map((name) => COLUMNS[name])], rows),
			h('p.note', `The ${plural(meta.keys.length, 'key')} shown hold ${percent(meta.held)} of the weight${sink}, the others ${percent(meta.rest)}. Largest score ${number(meta.largest, 4)}; log of the sum of exponentials ${number(meta.lse, 5)}.`)];
	};
	const weighed = (meta) => {
		if (!meta.output) return null;
		const cells = (values, step) => values.slice(0, PARTS).map((value) => h('td', { data: { step, value } }, number(value, 4)));
		const sums = meta.partial.map((sum, i) => row([i ? '+ ' : '', `${number(meta.table.softmax[i])} × value of `, token(meta.keys[i].label)], cells(sum, 'partial')));
		const out = row('output, of all keys', cells(meta.output, 'output'), { class: 'chosen' });
		const differs = meta.difference === null ? null : h('p.note', 'The model’s own output of this head differs by at most ', h('b', { data: { difference: meta.difference } }, number(meta.difference)), `. ${meta.own_is ?? ''}`);
		return [vector(meta.output), table('Weighted values, added up', ['sum so far', ...meta.output.slice(0, PARTS).map((_, i) => `[${i}]`)], [...sums, out]), differs];
	};
	const product = (q, k, score) => h('div.vector', `${q.slice(0, TERMS).map((value, i) => `${number(value)} × ${number(k[i])}`).join(' + ')}${q.length > TERMS ? ` + … ${q.length - TERMS} more` : ''} = ${number(score, 5)}`);
	const show = (meta) => {
		const at = Math.max(0, meta.keys.findIndex(({ key }) => key === state.key));
		const key = meta.keys[at];
		const vectors = { query: meta.q, key: meta.k[at], value: meta.v?.[at] };
		replace(title, 'Token ', token(meta.label, meta.query), ` in layer ${state.layer}, head ${state.head}`);
		replace(body, h('ol.steps', meta.steps.map((step) => {
			const { name } = step;
			if (name in vectors) return stepItem(step, name === 'query' || !key ? '' : [' of ', token(key.label)], vectors[name] && vector(vectors[name]));
			if (!(name in COLUMNS)) return stepItem(step, '', weighed(meta));
			const value = key ? (meta.table[name][at] ?? -Infinity) : NaN;
			return stepItem(step, '', name === 'score' && key ? product(meta.q, meta.k[at], value) : h('div.vector', number(value, 5)), name === 'softmax' && scores(meta, at));
		})));
	};
	const load = app.latest(async (signal) => {
		if (state.query === null) {
			replace(title);
			return void replace(body, h('p.empty', 'Choose a token in the map or in the text: its steps are shown here.'));
		}
		const keys = state.key === null ? [] : [state.key];
		const { meta } = await app.call('steps', { ...app.head, query: state.query, count: Number(count.value) || 16, keys }, signal);
		show(meta);
	}, () => {
		title.replaceChildren();
		body.replaceChildren();
	});
	return {
		element: h('div', h('p.about', 'How the chosen token’s output in this head is computed: its query meets every key, softmax turns scores into weights, and the values are mixed by them.'), h('div.tools', h('label.field', 'keys shown', count)), title, body),
		update(changed) {
			if (changed.any('run', 'layer', 'head', 'query', 'key', 'tab')) load();
		},
	};
}
