// Saves what is on screen: as a picture, as numbers, as a page for later, or as a link.

import { button, canvasOf, h } from './dom.js';
import { SvgPaper } from './paper.js';

const MOST = 512; // weights on a side of what is written as numbers

// A table as CSV: fields are quoted where they have to be, for tokens can hold anything.
function csv(rows) {
	const field = (text) => (/[",\r\n]|^\s|\s$/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
	return rows.map((row) => `${row.map((value) => field(String(value))).join(',')}\r\n`).join('');
}

export function createSave(app, map, open) {
	const { state } = app;
	const name = (ending) => `regard-layer${state.layer}-head${state.head}.${ending}`;
	const download = (file, content, type) => {
		const url = URL.createObjectURL(new Blob([content], { type }));
		h('a', { href: url, download: file }).click();
		setTimeout(() => URL.revokeObjectURL(url), 10000);
	};
	const png = async () => {
		const { width, height } = map.size();
		const canvas = canvasOf(width * 2, height * 2);
		const context = canvas.getContext('2d');
		context.scale(2, 2);
		map.paint(context);
		download(name('png'), await new Promise((done) => canvas.toBlob(done)), 'image/png');
	};
	const svg = () => {
		const paper = new SvgPaper(map.size(), `Attention weights of layer ${state.layer}, head ${state.head}`);
		map.paint(paper);
		download(name('svg'), paper.toString(), 'image/svg+xml');
	};
	const numbers = async () => {
		const seen = map.seen();
		const [queries, keys] = [seen.queries, seen.keys].map(([first, end]) => [first, Math.min(end, first + MOST)]);
		const { meta, data } = await app.call('sel', { heads: [[state.layer, state.head]], queries, keys });
		await Promise.all([app.tokens('query').range(...queries), app.tokens('key').range(...keys)]);
		const lines = [...new Float32Array(data)].map((weight, i) => {
			const [query, key] = [queries[0] + Math.floor(i / meta.columns), keys[0] + (i % meta.columns)];
			return [query, app.tokens('query').label(query), key, app.tokens('key').label(key), weight];
		});
		download(name('csv'), csv([['query', 'query token', 'key', 'key token', 'weight'], ...lines]), 'text/csv');
		const cut = queries[1] < seen.queries[1] || keys[1] < seen.keys[1];
		app.announce(cut ? `Saved the first ${MOST} by ${MOST} weights in sight; zoom in for others.` : 'Saved the weights in sight.', true);
	};
	const page = (heads) => async () => {
		const ended = await open.work({ what: 'export', heads: heads() }, 'Writing the page');
		if (ended?.meta.state === 'done') download(ended.meta.result.name, ended.data, 'text/html');
	};
	const link = async () => {
		app.writeHash();
		const copied = await navigator.clipboard.writeText(location.href).then(() => true, () => false);
		app.announce(copied ? 'The link to this view is copied.' : 'The address of this page is the link to this view.', true);
	};
	const close = () => {
		list.hidden = true;
		opener.setAttribute('aria-expanded', 'false');
	};
	const item = (words, about, run) => button([words, h('small', about)], () => {
		close();
		opener.focus();
		Promise.resolve(run()).catch(app.fault);
	});
	const exports = [item('This head as a page', 'one HTML file that works offline', page(() => [[state.layer, state.head]])), item('All heads as a page', 'everything here in one HTML file', page(() => null))];
	const list = h('div', { hidden: true }, item('Link', 'to exactly what is on screen', link), item('Picture (PNG)', 'the map as it is shown', png), item('Drawing (SVG)', 'the map, its words as text', svg), item('Numbers (CSV)', 'the weights in sight', numbers), exports);
	const opener = button('Save ▾', () => {
		list.hidden = !list.hidden;
		opener.setAttribute('aria-expanded', !list.hidden);
		if (!list.hidden) list.firstChild.focus();
	}, { 'aria-expanded': 'false' });
	const element = h('div.menu', { onkeydown: (event) => {
		if (event.key !== 'Escape' || list.hidden) return;
		close();
		opener.focus();
	}, onfocusout: ({ relatedTarget: to }) => !element.contains(to) && close() }, opener, list);
	return {
		element,
		update() {
			for (const one of exports) one.hidden = !app.info.can.export;
		},
	};
}
