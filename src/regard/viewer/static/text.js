// The text itself, shaded by what one token looks at or by who looks at it.

import { button, checkbox, choice, h, meter, replace, roving, row, switcher, table, token } from './dom.js';
import { heat } from './color.js';
import { count, largest, number, plural } from './numbers.js';
import { createArcs } from './arcs.js';
import { createPictures } from './picture.js';

const SPAN = 800; // tokens that are written at once
const LISTED = 8;
const FAINT = 0.02; // a smaller part of the largest weight is not shaded

// The mean over heads: one number per token.
function meanOf(data, heads) {
	const values = new Float32Array(data);
	const mean = new Float32Array(values.length / heads);
	values.forEach((value, i) => (mean[i % mean.length] += value / heads));
	return mean;
}

// A part of the text along one axis, token by token.
function createBlock(app, of, title, press) {
	const box = h('div.text', { role: 'group', label: title });
	const pages = h('div.tools');
	let first = 0;
	let spans = [];
	const settle = roving(box, () => spans, () => 1);
	const block = {
		element: h('div', box, pages),
		shade(weights, chosen, marked) {
			spans.forEach((span, i) => {
				const index = first + i;
				const share = weights && weights.top > 0 && !(app.state.hide && index === 0) ? weights.values[index] / weights.top : 0;
				const [background, color] = share > FAINT ? heat(share, app.dark) : ['', ''];
				Object.assign(span.style, { background, color });
				span.classList.toggle('key', index === marked);
				span.classList.toggle('chosen', index === chosen);
				span.setAttribute('aria-pressed', index === chosen);
				span.title = weights ? `${index}: ${number(weights.values[index])}` : index;
			});
		},
		async write(start, signal) {
			const tokens = app.tokens(of);
			const from = Math.max(0, Math.min(start, tokens.length - SPAN));
			const stop = Math.min(tokens.length, from + SPAN);
			await tokens.range(from, stop);
			if (signal.aborted) return;
			first = from;
			spans = [];
			for (let index = from; index < stop; index++) {
				const text = tokens.text(index);
				const label = tokens.label(index);
				const sign = (words) => h('span.nl', words);
				// what would turn the direction of writing is shown by its sign
				const body = text && !/[^\P{C}\n\r\t]/u.test(text) ? text.split(/(\n)/).map((part) => (part === '\n' ? [sign('↵'), part] : part)) : sign(text ? label : label.replace(/.*(?= \d+\/\d+$)/, '')); // of a character's later parts, their number alone
				spans.push(h('span.t', { role: 'button', tabindex: -1, label: `${label}, token ${index}`, data: { token: index }, onclick: (event) => press(index, event) }, body));
			}
			replace(box, spans);
			box.classList.toggle('places', spans.length > 1 && !tokens.text(stop - 1));
			settle();
			const long = tokens.length > SPAN;
			const turn = (words, to, off) => button(words, () => block.turned(to), { disabled: off });
			replace(pages, long ? [h('span.tag', `tokens ${count(from)} to ${count(stop - 1)} of ${count(tokens.length)}`), h('span.joined', turn('Earlier', from - SPAN, from === 0), turn('Later', stop, stop === tokens.length))] : []);
			pages.hidden = !long;
		},
		// Brings a token into sight, turning pages for it.
		async bring(index, signal) {
			if (!spans[index - first]) await block.write(index - SPAN / 2, signal);
			const room = box.getBoundingClientRect();
			const place = spans[index - first]?.getBoundingClientRect();
			if (place && (place.top < room.top || place.bottom > room.bottom)) box.scrollTop += place.top - room.top - room.height / 3;
		},
	};
	box.addEventListener('keydown', (event) => {
		const at = spans.indexOf(event.target);
		if (at < 0 || (event.key !== 'Enter' && event.key !== ' ')) return;
		event.preventDefault();
		press(first + at, event);
	});
	return block;
}

export function createText(app) {
	const { store, state } = app;
	const about = h('p.about');
	const list = h('div');
	const note = h('p.note', { role: 'status' });
	const body = h('div.two-texts');
	let blocks = null;
	let shape = null;
	let weights = null; // {values, top}

	const direction = switcher('Direction', [['to', 'Looks at'], ['from', 'Looked at by']], store.put('text'));
	const heads = choice('Heads', [['one', 'the open head'], ['set', 'a set of heads'], ['all', 'all heads (mean)']], 'one', store.put('heads'));
	const set = h('input', { type: 'text', size: 12, placeholder: '3.1, 5.0', label: 'Heads of the set, as layer.head', title: 'Or choose heads with Ctrl and a click' });
	set.addEventListener('change', () => store.set({ set: set.value.match(/\d{1,6}\.\d{1,6}/g)?.slice(0, 64) ?? [] }));
	const arcsOn = checkbox('Arcs', store.put('arcs'), 'Lines between the tokens of a part of the text');
	const arcs = createArcs(app);
	const pictures = createPictures(app);

	const chosenHeads = () => {
		const found = state.heads === 'all' ? app.alikeHeads() : state.heads === 'set' ? app.setHeads() : [];
		return found.length ? found : [[state.layer, state.head]];
	};
	const separate = () => app.layer.texts[0] !== app.layer.texts[1];
	const of = () => (state.text === 'to' ? 'key' : 'query'); // what is shaded
	const from = () => (state.text === 'to' ? 'query' : 'key'); // what is clicked
	const press = (which) => (index, event) => {
		const side = separate() ? which : from();
		const other = state[side];
		if (event.shiftKey && other !== null && side === 'query') store.set({ span: [Math.min(index, other), Math.max(index, other)], arcs: true });
		else app.choose(side === from() ? { [from()]: index, [of()]: null } : { [side]: index });
	};
	const write = app.latest(async (signal) => {
		const titles = separate() ? { query: 'The text that looks', key: 'The text looked at' } : { query: 'Text, token by token' };
		const sides = Object.keys(titles);
		const written = Object.fromEntries(sides.map((side) => [side, createBlock(app, side, titles[side], press(side))]));
		for (const side of sides) {
			written[side].turned = app.latest(async (stop, to) => {
				await written[side].write(to, stop);
				shade();
			});
		}
		await Promise.all(sides.map((side) => written[side].write((state[side] ?? 0) - SPAN / 2, signal)));
		if (signal.aborted) return;
		blocks = written;
		replace(body, sides.map((side) => [sides.length > 1 && h('h3', titles[side]), blocks[side].element]));
		await ask();
	});
	const shade = () => {
		const chosen = state[from()];
		if (blocks.key) {
			blocks[of()].shade(weights, null, state[of()]);
			blocks[from()].shade(null, chosen, null);
		} else blocks.query.shade(weights, chosen, state[of()]);
		pictures.shade(weights, chosen);
	};
	const tell = async (signal, clicked) => {
		const many = chosenHeads().length;
		const who = many === 1 ? 'in this head' : `in the mean of ${plural(many, 'head')}`;
		about.textContent = `Click a token: the stronger another is coloured, the more ${state.text === 'to' ? 'the clicked token looks at it' : 'it looks at the clicked token'}, ${who}.`;
		if (clicked === null) {
			note.textContent = '';
			return void replace(list);
		}
		const tops = largest(weights.values, LISTED, state.hide ? 1 : 0);
		const [[label], labels] = await Promise.all([app.tokens(from()).labelled(clicked), app.tokens(of()).labelled(...tops)]);
		if (signal.aborted) return;
		const hidden = state.hide && weights.values[0] > 0 ? ` The first token, not coloured, has ${number(weights.values[0])}.` : '';
		replace(note, token(label, clicked), tops.length ? (state.text === 'to' ? ' looks most at:' : ' is looked at most by:') : ': the mask lets no token look here.', hidden);
		const line = (index, i) => {
			const weight = weights.values[index];
			const go = () => app.choose({ [from()]: clicked, [of()]: index });
			return row([button(token(labels[i]), go, { class: 'plain' }), h('small', ` ${index}`)], h('td', number(weight), meter(weight / weights.top)));
		};
		replace(list, tops.length ? table('Tokens with most weight', ['token', 'weight'], tops.map(line)) : []);
	};
	const ask = app.latest(async (signal) => {
		if (!blocks) return;
		const clicked = state[from()];
		let found = null;
		if (clicked !== null) {
			const { meta, data } = await app.call(state.text === 'to' ? 'row' : 'column', { heads: chosenHeads(), [from()]: clicked }, signal);
			const values = meanOf(data, meta.heads.length);
			found = { values, top: values.reduce((most, value, i) => (state.hide && i === 0 ? most : Math.max(most, value)), 0) };
			await (blocks[from()] ?? blocks.query).bring(clicked, signal);
			if (blocks.key && state[of()] !== null) await blocks[of()].bring(state[of()], signal);
		}
		if (signal.aborted) return;
		weights = found;
		shade();
		await tell(signal, clicked);
	}, () => {
		weights = null;
		shade();
		tell(null, null);
	});
	return {
		element: h('section.panel.text-panel', { 'aria-labelledby': 'text-title' }, h('h2', { id: 'text-title' }, 'Text'), about,
			h('div.tools', direction.element, heads.element, set, arcsOn.element), pictures.element, body, arcs.element, note, list),
		update(changed) {
			direction.set(state.text);
			heads.select.value = state.heads;
			set.hidden = state.heads !== 'set';
			if (document.activeElement !== set) set.value = state.set.join(', ');
			arcsOn.input.checked = state.arcs;
			const now = [app.reading, app.layer.query_len, app.layer.texts].join();
			if (changed.any('run', 'layer')) pictures.build().catch(app.fault);
			if (now !== shape) {
				shape = now;
				write();
			} else if (changed.any('run', 'layer', 'head', 'query', 'key', 'text', 'heads', 'set', 'hide')) ask();
			else if (changed.has('theme') && blocks) shade();
			arcs.update(changed, chosenHeads);
		},
	};
}
