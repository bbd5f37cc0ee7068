// The page: what every panel shares, and which panel stands where.

import { createChange } from './change.js';
import { createColumns } from './columns.js';
import { createCompare } from './compare.js';
import { button, choice, h, replace, roving, switcher } from './dom.js';
import { createExample } from './example.js';
import { createHeads } from './heads.js';
import { createMap } from './map.js';
import { count, plural } from './numbers.js';
import { createOpen } from './open.js';
import { createSave } from './save.js';
import { createSteps } from './steps.js';
import { Changes, createStore } from './store.js';
import { createText } from './text.js';
import { Tokens } from './tokens.js';
import { aborted, asking } from './transport.js';

const SAID = 6000; // ms that a remark stays
const HASH_WAIT = 200;
const TABS = { steps: 'Step by step', columns: 'Head by head', change: 'Change heads', compare: 'Two heads' };

// What a browser remembers; where it may not, nothing that lasts.
function memory() {
	try {
		return localStorage;
	} catch {
		return {};
	}
}

// Builds the page in `root`. linked: whether the part after # of the address is this page's own.
export async function startPage(root, transport, { linked = true } = {}) {
	root.classList.add('regard');
	const store = createStore((changed) => {
		if (!info) return;
		if (changed.has('batch')) changed.add('run'); // other tokens, other weights
		tell(changed);
		clearTimeout(hashTimer);
		hashTimer = setTimeout(writeHash, HASH_WAIT);
	});
	const { state } = store;
	const unknown = () => ({ heads: [], kinds: [], complete: false, at: new Map() });
	const summaries = unknown();
	const screen = matchMedia('(prefers-color-scheme: dark)');
	const live = h('div.hidden-words', { 'aria-live': 'polite' });
	const said = h('div.fault', { hidden: true });
	const axes = new Map();
	let theme = memory()['regard theme'] ?? 'auto';
	let info = null;
	let suggested = null; // what was opened without being asked for
	let under = 0; // questions under way
	let saidTimer = 0;
	let hashTimer = 0;

	// ---- what every panel uses
	const say = (...words) => {
		clearTimeout(saidTimer);
		said.hidden = false;
		replace(said, ...words);
	};
	const hush = () => (said.hidden = true);
	const idle = () => (root.dataset.idle = under === 0);
	const app = {
		...asking(transport, (error) => app.fault(error)),
		transport, store, state, summaries,
		get info() {
			return info;
		},
		get layer() {
			return info.layers[state.layer];
		},
		get head() {
			return { layer: state.layer, head: state.head };
		},
		// Names what is read: as long as it is the same, so are the tokens.
		get reading() {
			return `${info.run}.${state.batch}`;
		},
		async call(method, params, signal) {
			under++;
			idle();
			try {
				return await transport.call(method, { run: info?.run, batch: state.batch, ...params }, signal);
			} finally {
				under--;
				setTimeout(idle);
			}
		},
		// While a run grows, an answer can be older than the question: what went wrong is asked again as it goes on.
		fault(error) {
			if (!aborted(error) && !info?.growing) say(h('span.bad', { role: 'alert' }, error.message), button('Close', hush, { class: 'plain' }));
		},
		// Until nothing is asked for any more.
		async rest() {
			while (under) await new Promise((done) => setTimeout(done, 30));
		},
		announce(words, shown) {
			live.textContent = words;
			if (!shown) return;
			say(words);
			saidTimer = setTimeout(hush, SAID);
		},
		has: (layer, head) => Boolean(info.layers[layer]?.heads.includes(head)),
		// Whether a head can be shown together with the open one: it reads the same.
		alike: (layer, head) => app.has(layer, head) && `${info.layers[layer].texts}` === `${app.layer.texts}`,
		alikeHeads: () => info.layers.flatMap((layer, i) => layer.heads.filter((head) => app.alike(i, head)).map((head) => [i, head])),
		setHeads: () => state.set.map((one) => one.split('.').map(Number)).filter((one) => app.alike(...one)),
		summary: (layer, head) => summaries.at.get(`${layer}.${head}`),
		tokens(of) {
			const length = app.layer[`${of}_len`];
			const name = [app.reading, length, app.layer.texts[of === 'query' ? 0 : 1]].join();
			if (!axes.has(name)) {
				const { layer } = state;
				axes.set(name, new Tokens(length, async (start, stop) => (await app.call('tokens', { of, layer, start, stop })).meta, () => tell(new Changes(['tokens']))));
			}
			return axes.get(name);
		},
		// Something is chosen: every panel moves there.
		choose(part) {
			store.set(part);
			queueMicrotask(map.reveal);
		},
		show(tab) {
			store.set({ tab });
			queueMicrotask(() => tabs.querySelector('[aria-selected="true"]').focus());
		},
		openRun,
		writeHash,
	};

	// ---- light and dark
	const onTheme = () => {
		app.dark = theme === 'auto' ? screen.matches : theme === 'dark';
		root.dataset.theme = app.dark ? 'dark' : 'light';
		const style = getComputedStyle(root);
		app.colours = Object.fromEntries(['ink', 'soft', 'edge', 'panel', 'sunk', 'accent', 'weight', 'curve'].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
		if (info) tell(new Changes(['theme']));
	};
	screen.addEventListener('change', onTheme);

	// ---- the link
	const address = () => new URLSearchParams(linked ? location.hash.slice(1) : '');
	function writeHash() {
		clearTimeout(hashTimer);
		const run = info.runs.length > 1 ? `run=${info.run}&` : '';
		if (linked) history.replaceState(null, '', `#${run}${store.hash()}`);
	}
	const onHash = async () => {
		const run = Number(address().get('run') ?? info.run);
		if (run !== info.run && info.runs.some((one) => one.run === run)) await openRun(run).catch(app.fault);
		store.read(location.hash);
		settle();
	};
	if (linked) addEventListener('hashchange', onHash);

	// ---- a run
	// Nothing is chosen that is not there.
	const settle = () => {
		const layer = info.layers[state.layer]?.heads.length ? state.layer : info.layers.findIndex((one) => one.heads.length);
		const { heads, query_len: queries, key_len: keys } = info.layers[layer];
		const within = (index, length) => (index !== null && index < length ? index : null);
		store.set({ batch: Math.min(state.batch, info.batch - 1), layer, head: heads.includes(state.head) ? state.head : heads[0], query: within(state.query, queries), key: within(state.key, keys) });
	};
	const describe = () => {
		const { layers, start, stop, total } = info;
		const size = total && stop - start < total ? `tokens ${count(start)} to ${count(stop - 1)} of ${count(total)}` : plural(stop - start, 'token');
		const heads = plural(layers.flatMap((layer) => layer.heads).length, 'head');
		replace(what, h('b', info.model), ` reading ${info.source || 'a text'} · ${size} · ${plural(layers.length, 'layer')}, ${heads}${info.growing ? ' · being written' : ''}`, info.rounded && h('small', ` · ${info.rounded}`));
		if (linked) document.title = `${info.source || info.model} · regard`;
	};
	const summarise = app.latest(async (signal) => {
		for (;;) {
			const { meta } = await app.call('heads', {}, signal);
			Object.assign(summaries, meta, { at: new Map(meta.heads.map((one) => [`${one.layer}.${one.head}`, one])) });
			tell(new Changes(['summary']));
			if (meta.complete) await suggest(signal);
			if (meta.complete || !meta.job) return;
			const { meta: ended } = await app.follow(meta.job, null, signal);
			if (ended.state === 'stopped') return;
		}
	});
	// Once it is known what heads do, the most telling one is opened, unless somebody has chosen by then.
	const suggest = async (signal) => {
		const seen = suggested;
		suggested = null;
		if (!seen || seen.layer !== state.layer || seen.head !== state.head || seen.query !== state.query) return;
		const { meta } = await app.call('info', {}, signal);
		store.set(meta.chosen);
	};
	// grows: the run is being written, and its end is what is looked at.
	async function openRun(run, grows = false) {
		const { meta } = await app.call('info', { run });
		const first = !info;
		const other = meta.run !== info?.run;
		const longer = info?.stop !== meta.stop;
		info = meta;
		hush();
		const { chosen } = info;
		if (first && linked) store.read(location.hash);
		else if (other) store.set({ batch: 0, query: null, key: null, at: null, span: null, changes: [], other: [] });
		const told = first ? address() : new Map();
		if (other && !told.has('layer')) store.set({ layer: chosen.layer, head: chosen.head });
		if (other && !told.has('query') && !told.has('key')) store.set({ query: chosen.query });
		if (other) suggested = !told.has('layer') && !told.has('query') ? { ...chosen } : null;
		if (grows) store.set({ query: app.layer.query_len - 1, key: null, at: null });
		settle();
		describe();
		if (other) Object.assign(summaries, unknown());
		if (other || longer || !grows) tell(new Changes(['run', 'layer', 'head', 'query', 'key', 'tab']));
		if (!info.growing) summarise();
	}

	// ---- the frame
	const what = h('p.what');
	const themes = choice('Theme', [['auto', 'as the system'], ['light', 'light'], ['dark', 'dark']], theme, (value) => {
		theme = value;
		memory()['regard theme'] = value;
		onTheme();
	});
	const open = createOpen(app);
	const map = (app.map = createMap(app));
	const save = createSave(app, map, open);
	const panels = [open, save, createHeads(app), map, createText(app)];
	const bodies = { steps: createSteps(app), columns: createColumns(app), change: createChange(app), compare: createCompare(app), example: createExample(app) };
	const tabs = h('div', { role: 'tablist', label: 'More about this head' }, Object.entries(TABS).map(([tab, label]) => button(label, () => store.set({ tab }), { role: 'tab', id: `tab-${tab}`, 'aria-controls': 'tab-body', data: { tab } })));
	roving(tabs, () => [...tabs.children], () => 1);
	tabs.addEventListener('focusin', ({ target }) => target.getAttribute('aria-selected') === 'true' || target.click());
	const which = switcher('Whose steps', [['steps', 'This token'], ['example', 'Three-token example']], store.put('tab'));
	const body = h('div', { role: 'tabpanel', id: 'tab-body' }, which.element, Object.values(bodies).map((one) => one.element));
	const turn = () => {
		const shown = state.tab === 'example' ? 'steps' : state.tab;
		for (const tab of tabs.children) {
			tab.setAttribute('aria-selected', tab.dataset.tab === shown);
			tab.tabIndex = tab.dataset.tab === shown ? 0 : -1;
		}
		body.setAttribute('aria-labelledby', `tab-${shown}`);
		which.element.hidden = shown !== 'steps';
		which.set(state.tab);
		for (const [tab, one] of Object.entries(bodies)) one.element.hidden = tab !== state.tab;
	};
	function tell(changed) {
		turn();
		for (const panel of [...panels, bodies[state.tab]]) panel.update(changed);
	}
	replace(root,
		h('header.top', h('h1', 'regard'), what, h('div.actions', open.controls, save.element, themes.element)), open.bar, said,
		h('main', panels.slice(2).map((panel) => panel.element), h('section.panel.more', { label: 'More about this head' }, tabs, body)), open.dialogs, live);
	onTheme();
	await openRun().catch(app.fault);
	return {
		app,
		end() {
			clearTimeout(hashTimer);
			clearTimeout(saidTimer);
			screen.removeEventListener('change', onTheme);
			removeEventListener('hashchange', onHash);
			root.replaceChildren();
		},
	};
}
