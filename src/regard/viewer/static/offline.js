// Heads without a server: weights computed here from the query, key and lse that a saved page holds.
//   weight(i, j) = exp(score(i, j) - lse[i])      score = softcap(scale * q_i . k_j) + bias

import { PER_OCTAVE } from './numbers.js';
import { TILE } from './tiles.js';

const BUSY = 12; // ms of computing before the page may draw

// As in numbers.js.
export function codeOf(weight) {
	if (!(weight > 0)) return 0;
	return Math.min(65535, Math.max(1, Math.round(65535 + PER_OCTAVE * Math.log2(weight))));
}

const breathe = () => new Promise((done) => {
	const { port1, port2 } = new MessageChannel();
	port1.onmessage = () => {
		port1.close();
		done();
	};
	port2.postMessage(0);
});

// Lets the page draw now and then, and stops when nobody wants the result any more.
export function pacer(signal) {
	let since = performance.now();
	return async () => {
		if (performance.now() - since >= BUSY) {
			await breathe();
			since = performance.now();
		}
		signal?.throwIfAborted();
	};
}

// Reads the packed numbers of a file: each blob once.
export class Blobs {
	constructor(packed) {
		Object.assign(this, { packed, read: new Map() });
	}

	bytes(index) {
		if (!this.read.has(index)) {
			const raw = Uint8Array.from(atob(this.packed[index]), (sign) => sign.charCodeAt(0));
			const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream('deflate'));
			this.read.set(index, new Response(stream).arrayBuffer());
		}
		return this.read.get(index);
	}

	async floats(index) {
		return new Float32Array(await this.bytes(index));
	}

	async integers(index) {
		return new Int32Array(await this.bytes(index));
	}

	// Rows of 16-bit numbers, high and low bytes apart, each row with its own scale.
	async matrix({ high, low, scale, rows, columns }) {
		const [above, below, scales] = await Promise.all([this.bytes(high), this.bytes(low), this.floats(scale)]);
		const [tops, ends] = [new Uint8Array(above), new Uint8Array(below)];
		const values = new Float32Array(rows * columns);
		for (let i = 0; i < values.length; i++) values[i] = (((tops[i] << 8) | ends[i]) << 16 >> 16) * scales[Math.floor(i / columns)];
		return { values, rows, columns };
	}
}

// One head whose weights can be computed. Ranges of visible keys stand in `spans`: start, first, stop.
export class Head {
	static async open(blobs, kept, span) {
		const head = new Head();
		const tensors = ['q', 'k', 'v'].map((name) => (kept[name] ? blobs.matrix(kept[name]) : null));
		const spans = Promise.all([blobs.integers(span.start), blobs.integers(span.first), blobs.integers(span.stop)]);
		[head.q, head.k, head.v] = await Promise.all(tensors);
		[head.starts, head.firsts, head.stops] = await spans;
		head.lse = await blobs.floats(kept.lse);
		head.bias = kept.bias ? await blobs.floats(kept.bias.toeplitz) : null;
		head.scale = kept.scale;
		head.softcap = kept.softcap;
		return head;
	}

	product(query, key) {
		const { columns } = this.q;
		const [q, k] = [this.q.values, this.k.values];
		let sum = 0;
		for (let i = query * columns, j = key * columns, end = i + columns; i < end; i++, j++) sum += q[i] * k[j];
		return sum;
	}

	biasOf(query, key) {
		return this.bias ? this.bias[key - query + this.q.rows - 1] : 0;
	}

	// The score before the mask.
	score(query, key) {
		const scaled = this.scale * this.product(query, key);
		return (this.softcap ? this.softcap * Math.tanh(scaled / this.softcap) : scaled) + this.biasOf(query, key);
	}

	visible(query) {
		let many = 0;
		for (let n = this.starts[query]; n < this.starts[query + 1]; n++) many += this.stops[n] - this.firsts[n];
		return many;
	}

	hidden(query, key) {
		for (let n = this.starts[query]; n < this.starts[query + 1]; n++) if (key >= this.firsts[n] && key < this.stops[n]) return false;
		return true;
	}

	// Calls see(key, weight) for every visible key of a query in [from, to).
	eachWeight(query, from, to, see) {
		const lse = this.lse[query];
		for (let n = this.starts[query]; n < this.starts[query + 1]; n++) {
			const last = Math.min(to, this.stops[n]);
			for (let key = Math.max(from, this.firsts[n]); key < last; key++) see(key, Math.exp(this.score(query, key) - lse));
		}
	}

	// A tile of codes: its cells hold 2^level x 2^level weights, their largest or their mass.
	async tile({ level, row, column, pool }, signal) {
		const cell = 2 ** level;
		const size = TILE * cell;
		const queries = [row * size, Math.min(this.q.rows, (row + 1) * size)];
		const keys = [column * size, Math.min(this.k.rows, (column + 1) * size)];
		const values = new Float64Array(TILE * TILE).fill(-1);
		const pace = pacer(signal);
		for (let query = queries[0]; query < queries[1]; query++) {
			const at = Math.floor((query - queries[0]) / cell) * TILE;
			const rest = (query - queries[0]) % cell;
			const rows = Math.min(cell, queries[1] - (query - rest));
			const keep = pool === 'max'
				? (key, weight) => {
						const to = at + Math.floor((key - keys[0]) / cell);
						if (weight > values[to]) values[to] = weight;
					}
				: (key, weight) => {
						const to = at + Math.floor((key - keys[0]) / cell);
						values[to] = Math.max(0, values[to]) + weight / rows;
					};
			this.eachWeight(query, ...keys, keep);
			await pace();
		}
		return Uint16Array.from(values, (value) => (value < 0 ? 0 : Math.max(1, codeOf(value))));
	}
}

// A head of which only finished codes are kept: one level, and what is coarser.
export class Codes {
	static async open(blobs, { level, rows, columns, max, mass }) {
		const codes = new Codes();
		const [largest, sums] = await Promise.all([blobs.bytes(max), blobs.bytes(mass)]);
		return Object.assign(codes, { level, rows, columns, max: new Uint8Array(largest), mean: new Uint8Array(sums) });
	}

	code(pool, row, column) {
		const kept = this[pool][row * this.columns + column];
		return kept ? Math.min(65535, (kept << 8) | 128) : 0;
	}

	// Finer than what is kept: the same cells, larger.
	async tile({ level, row, column, pool }, signal) {
		const codes = new Uint16Array(TILE * TILE);
		const pace = pacer(signal);
		const by = level - this.level;
		const parts = 2 ** Math.max(0, by);
		for (let r = 0; r < TILE; r++) {
			const first = Math.floor((row * TILE + r) * 2 ** by);
			const rows = Math.min(parts, this.rows - first);
			if (rows <= 0) break;
			for (let c = 0; c < TILE; c++) {
				const left = Math.floor((column * TILE + c) * 2 ** by);
				const columns = Math.min(parts, this.columns - left);
				if (columns <= 0) break;
				let value = 0;
				for (let y = first; y < first + rows; y++) {
					for (let x = left; x < left + columns; x++) {
						const code = this.code(pool, y, x);
						if (pool === 'max') value = Math.max(value, code);
						else if (code) value += 2 ** ((code - 65535) / PER_OCTAVE) / rows;
					}
				}
				codes[r * TILE + c] = pool === 'max' ? value : codeOf(value);
			}
			await pace();
		}
		return codes;
	}
}
