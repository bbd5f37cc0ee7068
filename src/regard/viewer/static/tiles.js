// The tiles of one head that are in memory, and those under way: nearest to the middle first, what is no longer wanted is
// dropped, the longest unused goes when there are too many.

import { aborted } from './transport.js';

const KEPT = 160;
const AT_ONCE = 4;

export const TILE = 256;

function nameOf({ pool, level, row, column }) {
	return `${pool}/${level}/${row}/${column}`;
}

export class Tiles {
	// fetch(tile, signal) -> {codes, exact}; arrived() when one is there; failed(error).
	constructor(fetch, arrived, failed) {
		Object.assign(this, { fetch, arrived, failed, kept: new Map(), under: new Map(), wanted: [], version: 0 });
	}

	get(tile) {
		const name = nameOf(tile);
		const entry = this.kept.get(name);
		if (entry) {
			this.kept.delete(name);
			this.kept.set(name, entry);
		}
		return entry;
	}

	// The tile that holds this one and is there, from the next coarser level up.
	standIn(tile, levels) {
		let { level, row, column } = tile;
		while (++level < levels) {
			row >>= 1;
			column >>= 1;
			const entry = this.get({ pool: tile.pool, level, row, column });
			if (entry) return entry;
		}
		return undefined;
	}

	// These are wanted now, the most wanted first, and no others.
	want(tiles) {
		this.wanted = tiles.filter((tile) => {
			const entry = this.kept.get(nameOf(tile));
			return (!entry || entry.outdated) && !this.under.has(nameOf(tile));
		});
		const names = new Set(tiles.map(nameOf));
		for (const [name, control] of this.under) {
			if (!names.has(name)) {
				this.under.delete(name);
				control.abort();
			}
		}
		this.start();
	}

	start() {
		while (this.under.size < AT_ONCE && this.wanted.length) this.ask(this.wanted.shift());
	}

	async ask(tile) {
		const name = nameOf(tile);
		const control = new AbortController();
		this.under.set(name, control);
		try {
			const found = await this.fetch(tile, control.signal);
			if (this.under.get(name) !== control) return;
			this.kept.delete(name);
			this.kept.set(name, { ...tile, ...found });
			while (this.kept.size > KEPT) this.kept.delete(this.kept.keys().next().value);
			this.under.delete(name);
			this.version++;
			this.arrived();
		} catch (error) {
			const current = this.under.get(name) === control;
			if (current) this.under.delete(name);
			if (current && !aborted(error)) this.failed(error);
		}
		this.start();
	}

	// Previews among the kept whose queries are all below `done` are to be asked for again.
	outdate(done) {
		let any = false;
		for (const entry of this.kept.values()) {
			const last = (entry.row + 1) * TILE * 2 ** entry.level;
			if (!entry.exact && last <= done) any = entry.outdated = true;
		}
		return any;
	}

	clear() {
		for (const control of this.under.values()) control.abort();
		this.under.clear();
		this.kept.clear();
		this.wanted = [];
	}
}
