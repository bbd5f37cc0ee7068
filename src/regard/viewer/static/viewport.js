// Where the map is: which key stands at the left edge, which query at the top, and how many pixels a weight is wide.

import { clamp } from './dom.js';

const WIDEST_CELL = 64;

export class Viewport {
	constructor(queries, keys, width, height) {
		Object.assign(this, { queries, keys, width, height, x: 0, y: 0, cell: 1 });
		this.fit();
	}

	// The pixels of a weight at which the whole matrix can be seen.
	get whole() {
		return Math.min(WIDEST_CELL, this.width / this.keys, this.height / this.queries);
	}

	get isWhole() {
		return this.cell <= this.whole * 1.0001;
	}

	fit() {
		this.cell = this.whole;
		this.x = this.y = 0;
	}

	resize(width, height) {
		const was = this.isWhole;
		Object.assign(this, { width, height });
		if (was) this.fit();
		else this.settle();
	}

	place(x, y, cell) {
		Object.assign(this, { x, y, cell });
		this.settle();
	}

	// Nothing but the matrix: what is smaller than the room stands at its beginning.
	settle() {
		this.cell = clamp(this.cell, this.whole, WIDEST_CELL);
		this.x = clamp(this.x, 0, Math.max(0, this.keys - this.width / this.cell));
		this.y = clamp(this.y, 0, Math.max(0, this.queries - this.height / this.cell));
	}

	pan(dx, dy) {
		this.x += dx / this.cell;
		this.y += dy / this.cell;
		this.settle();
	}

	// Zooms, and what is at that pixel stays there.
	zoom(factor, px = this.width / 2, py = this.height / 2) {
		const x = this.x + px / this.cell;
		const y = this.y + py / this.cell;
		this.cell = clamp(this.cell * factor, this.whole, WIDEST_CELL);
		this.x = x - px / this.cell;
		this.y = y - py / this.cell;
		this.settle();
	}

	// Query and key at a pixel, or null outside.
	at(px, py) {
		const key = Math.floor(this.x + px / this.cell);
		const query = Math.floor(this.y + py / this.cell);
		const inside = px >= 0 && py >= 0 && px <= this.width && py <= this.height;
		return inside && key < this.keys && query < this.queries ? { query, key } : null;
	}

	// Moves just so far that a weight is in sight; `middle` puts it in the middle.
	show(query, key, middle = false) {
		const wide = this.width / this.cell;
		const high = this.height / this.cell;
		const move = (from, room, at) => {
			if (middle) return at + 0.5 - room / 2;
			return at < from ? at : at + 1 > from + room ? at + 1 - room : from;
		};
		if (key !== null) this.x = move(this.x, wide, key);
		if (query !== null) this.y = move(this.y, high, query);
		this.settle();
	}

	left(key) {
		return (key - this.x) * this.cell;
	}

	top(query) {
		return (query - this.y) * this.cell;
	}

	// The keys and queries in sight: [first, end).
	get seen() {
		return {
			keys: [Math.floor(this.x), Math.min(this.keys, Math.ceil(this.x + this.width / this.cell))],
			queries: [Math.floor(this.y), Math.min(this.queries, Math.ceil(this.y + this.height / this.cell))],
		};
	}

	// The level whose cells are at least one device pixel wide: level n holds 2^n x 2^n weights in a cell.
	level(ratio, levels) {
		const level = Math.ceil(-Math.log2(this.cell * ratio) - 1e-6);
		return clamp(level, 0, levels - 1);
	}
}
