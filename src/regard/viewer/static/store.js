// What is on screen, in one object: everything the page shows follows from it, and it is the address's part after #.

const whole = { read: (text) => (/^\d{1,9}$/.test(text) ? Number(text) : undefined), write: String };
const oneOf = (...values) => ({ read: (text) => (values.includes(text) ? text : undefined), write: String });
const flag = { read: (text) => (text === '1' ? true : undefined), write: () => '1' };
const words = { read: (text) => text.slice(0, 80), write: String };
const list = (read, write = String) => ({
	read: (text) => {
		const found = text.split(',').filter(Boolean).slice(0, 64).map(read);
		return found.includes(null) ? undefined : found;
	},
	write: (values) => values.map(write).join(','),
});
const places = list((text) => (/^\d{1,9}\.\d{1,9}$/.test(text) ? text : null));
const numbers = (length) => {
	const { read, write } = list((text) => (Number.isFinite(Number(text)) ? Number(text) : null), (value) => String(Math.round(value * 1e4) / 1e4));
	return { read: (text) => (read(text)?.length === length ? read(text) : undefined), write };
};
// layer.head, then o (off), x0.5 (scaled) or k7 (without token 7)
const changes = list(
	(text) => {
		const [, layer, head, what, value] = text.match(/^(\d{1,6})\.(\d{1,6})([oxk])([\d.-]{0,12})$/) ?? [];
		const number = what === 'o' ? null : Number(value);
		return what && !Number.isNaN(number) ? { layer: Number(layer), head: Number(head), what, value: number } : null;
	},
	({ layer, head, what, value }) => `${layer}.${head}${what}${value ?? ''}`,
);

// name: [how it is written, its value at first]
const FIELDS = {
	batch: [whole, 0],
	layer: [whole, 0],
	head: [whole, 0],
	query: [whole, null],
	key: [whole, null],
	at: [numbers(3), null], // key at the left edge, query at the top, pixels of a weight; null: the whole
	pool: [oneOf('max', 'mean'), 'max'],
	scale: [oneOf('log', 'linear', 'uniform'), 'log'],
	range: [numbers(2), null], // codes of the first and the last colour; null: what suits what is in sight
	hide: [flag, false],
	text: [oneOf('to', 'from'), 'to'],
	heads: [oneOf('one', 'set', 'all'), 'one'],
	set: [places, []],
	arcs: [flag, false],
	span: [numbers(2), null],
	tab: [oneOf('steps', 'columns', 'change', 'compare', 'example'), 'steps'],
	other: [places, []],
	changes: [changes, []],
	sort: [oneOf('layer', 'score', 'entropy', 'distance'), 'layer'],
	kind: [words, ''],
};

// The names of what changed.
export class Changes extends Set {
	any(...names) {
		return names.some((name) => this.has(name));
	}
}

// listen(changes) is told of all changes of one moment together.
export function createStore(listen) {
	const state = Object.fromEntries(Object.entries(FIELDS).map(([name, [, first]]) => [name, first]));
	let changed = null;
	const tell = () => {
		const what = changed;
		changed = null;
		listen(what);
	};
	const set = (part) => {
		for (const [name, value] of Object.entries(part)) {
			if (!(name in FIELDS)) throw new Error(`there is no ${name} in the state`);
			if (state[name] === value) continue;
			state[name] = value;
			if (!changed) queueMicrotask(tell);
			(changed ??= new Changes()).add(name);
		}
	};
	return {
		state,
		set,
		put: (name) => (value) => set({ [name]: value }),
		hash: () => Object.entries(FIELDS)
			.filter(([name, [, first]]) => state[name] !== first && state[name]?.length !== 0)
			.map(([name, [kind]]) => `${name}=${encodeURIComponent(kind.write(state[name])).replaceAll('%2C', ',')}`).join('&'),
		// Reads an address; what it does not say, or says in no readable way, has its first value.
		read(hash) {
			const found = new URLSearchParams(hash.replace(/^#/, ''));
			const value = (name, [kind, first]) => (found.has(name) ? (kind.read(found.get(name)) ?? first) : first);
			set(Object.fromEntries(Object.entries(FIELDS).map(([name, field]) => [name, value(name, field)])));
		},
	};
}
