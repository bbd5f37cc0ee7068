// Switches heads off, scales them, hides a token from one, and shows what the model then predicts.

import { button, choice, h, meter, replace, row, table, token } from './dom.js';
import { number, percent } from './numbers.js';

export function createChange(app) {
	const { store, state } = app;
	const chips = h('ul.chips');
	const body = h('div.cols');
	const said = h('p.note', { role: 'status' });
	const input = (label) => h('input', { type: 'number', min: 0, label });
	const [layer, head, value] = [input('Layer'), input('Head'), h('input', { type: 'number', step: 'any', label: 'Factor, or token' })];
	const what = choice('do', [['o', 'switch off'], ['x', 'scale by'], ['k', 'hide token']], 'o', (kind) => offer(kind));
	const offer = (kind) => {
		value.hidden = kind === 'o';
		value.value = kind === 'x' ? 0.5 : (state.key ?? 0);
	};
	offer('o');
	const add = () => {
		const one = { layer: Number(layer.value), head: Number(head.value), what: what.select.value, value: value.hidden ? null : value.valueAsNumber };
		if (!app.has(one.layer, one.head)) return app.fault(new Error(`There is no head ${one.head} in layer ${one.layer}`));
		if (Number.isNaN(one.value) || (one.what === 'k' && !(one.value >>> 0 === one.value && one.value < app.info.layers[one.layer].key_len))) return app.fault(new Error(`${value.value || 'Nothing'} is no ${one.what === 'k' ? 'token of this text' : 'factor'}`));
		const same = (other) => ['layer', 'head', 'what'].every((name) => other[name] === one[name]) && (one.what !== 'k' || other.value === one.value);
		return store.set({ changes: [...state.changes.filter((other) => !same(other)), one] });
	};
	const clear = button('Undo all', () => store.set({ changes: [] }));
	const tools = h('div.tools', h('label.field', 'layer', layer), h('label.field', 'head', head), what.element, value, button('Add', add, { class: 'main' }), clear);
	const words = (one) => `${one.layer}.${one.head} ${{ o: 'off', x: `× ${one.value}`, k: `without token ${one.value}` }[one.what]}`;
	const guesses = ({ before, after }) => {
		const all = new Map();
		for (const [side, { guesses: best, also = [] }] of [['was', before], ['is', after]]) {
			for (const { id, label, probability } of [...best, ...also]) all.set(id, { id, label, ...all.get(id), [side]: probability });
		}
		const rows = [...all.values()].sort((a, b) => b.was - a.was).map(({ id, label, was, is }) => {
			const more = Math.round(1000 * (is - was)) / 10;
			return row([token(label), id === before.actual?.id ? ' in the text' : ''], [
				h('td', { data: { before: was } }, percent(was), meter(was)), h('td', { data: { after: is } }, percent(is), meter(is)),
				h('td', { class: more ? (more > 0 ? 'up' : 'down') : null }, `${more < 0 ? '−' : more ? '+' : ''}${Math.abs(more).toFixed(1)}`)], { class: id === before.actual?.id && 'chosen' });
		});
		return table('Guesses for the next token', ['next token', 'as it is', 'changed', 'difference'], rows);
	};
	const losses = ({ before, after }) => {
		const line = ([name, words_]) => before[name] !== null && row(words_, [h('td', number(before[name], 4)), h('td', { data: { loss: after[name] } }, number(after[name], 4)), h('td', { class: after[name] > before[name] ? 'down' : 'up' }, `${after[name] < before[name] ? '' : '+'}${number(after[name] - before[name])}`)]);
		return h('div', h('p.tag', 'Loss: how much the text surprises the model, in nats per token; less is better.'), table('Loss', ['', 'as it is', 'changed', 'difference'], [['loss', 'whole text'], ['rest', 'rest of the text']].map(line)));
	};
	const load = app.latest(async (signal) => {
		const waiting = !app.info.can.intervene ? 'This needs a model that foretells the next token; a recording or a saved page holds none.' : !state.changes.length ? 'Nothing is changed yet. The open head is filled in above: press Add.' : '';
		if (waiting) {
			said.textContent = waiting;
			return void replace(body);
		}
		said.textContent = 'Asking the model…';
		const query = state.query ?? app.layer.query_len - 1;
		const changes = state.changes.map((one) => ({ layer: one.layer, head: one.head, ...{ o: { kind: 'ablate' }, x: { kind: 'scale', factor: one.value }, k: { kind: 'hide', key: one.value } }[one.what] }));
		const { meta } = await app.call('start', { what: 'intervene', query, changes }, signal);
		const ended = (await app.follow(meta.job, null, signal)).meta;
		if (ended.state !== 'done') return;
		replace(said, 'What the model expects after ', token(await app.tokens('query').labelled(query), query), ':');
		replace(body, guesses(ended.result), losses(ended.result));
	}, () => {
		said.replaceChildren();
		body.replaceChildren();
	});
	return {
		element: h('div', h('p.about', 'Switch a head off, scale it, or hide a token from it: beside the model’s own guesses for the next token stand those without it.'), tools, chips, said, body),
		update(changed) {
			if (changed.any('layer', 'head', 'run', 'tab')) [layer.value, head.value] = [state.layer, state.head];
			for (const one of tools.querySelectorAll('button, input, select')) one.disabled = !app.info.can.intervene;
			replace(chips, state.changes.map((one) => h('li', words(one), button('×', () => store.set({ changes: state.changes.filter((other) => other !== one) }), { label: `Undo ${words(one)}` }))));
			clear.hidden = !state.changes.length;
			if (changed.any('run', 'changes', 'query', 'tab')) load();
		},
	};
}
