// How codes become pixels: the scale, the range and the colours of the map.

import { canvasOf, clamp } from './dom.js';
import { MASKED, colourAt, colourTable, css, rangeOf } from './color.js';
import { CODES, PER_OCTAVE, number, weightOf } from './numbers.js';
import { TILE } from './tiles.js';

const BINS = 1024;
const SNAP = PER_OCTAVE / 2; // ranges move in half octaves, so that a little more in sight does not change every colour
const EVEN = 32768; // the code of 1 relative to uniform; one code is two of the others
const SAMPLES = 40000;

// What a code of a tile is shown as: the mean of a cell for its mass; relative to uniform where that is asked.
export function shownCode(code, row, entry, { scale, visible }) {
	if (code === 0) return 0;
	const mean = entry.pool === 'mean' ? code - PER_OCTAVE * entry.level : code;
	if (scale !== 'uniform') return Math.max(1, mean);
	return clamp(Math.round(EVEN + (mean - 65535 + PER_OCTAVE * visible(row)) / 2), 1, CODES - 1);
}

// log2 of how many keys the queries of a row of cells may see, with the query in the middle for all of them.
export function visibleOf(series, level, tileRow) {
	return (row) => {
		if (!series) return 0;
		const query = Math.floor((tileRow * TILE + row + 0.5) * 2 ** level);
		return Math.log2(Math.max(1, series.visible[Math.min(query, series.visible.length - 1)]));
	};
}

export class Look {
	constructor() {
		Object.assign(this, { version: 0, scale: 'log', dark: true, hide: false, low: 1, high: 65535, series: null, pixels: null });
	}

	// Takes what changed and says whether anything did.
	set(part) {
		const differs = Object.keys(part).some((name) => this[name] !== part[name]);
		if (!differs) return false;
		Object.assign(this, part);
		this.version++;
		this.pixels = null;
		return true;
	}

	get map() {
		return this.scale === 'uniform' ? 'diverging' : 'weight';
	}

	get table() {
		const { low, high, dark, scale } = this;
		this.pixels ??= colourTable({ map: this.map, dark, low, high, log: scale !== 'linear' });
		return this.pixels;
	}

	// A tile as a canvas in these colours; painted again only when they change.
	paint(entry) {
		if (entry.painted === this.version) return entry.canvas;
		entry.canvas ??= canvasOf(TILE, TILE);
		const context = entry.canvas.getContext('2d');
		const image = (entry.image ??= context.createImageData(TILE, TILE));
		const pixels = new Uint32Array(image.data.buffer);
		const { codes } = entry;
		const colours = this.table;
		if (this.scale !== 'uniform' && entry.pool === 'max') {
			for (let i = 0; i < pixels.length; i++) pixels[i] = colours[codes[i]];
		} else {
			const visible = visibleOf(this.series, entry.level, entry.row);
			for (let row = 0; row < TILE; row++) {
				const seen = this.scale === 'uniform' ? visible(row) : 0;
				const how = { scale: this.scale, visible: () => seen };
				for (let i = row * TILE; i < (row + 1) * TILE; i++) pixels[i] = colours[shownCode(codes[i], row, entry, how)];
			}
		}
		if (this.hide && entry.column === 0) for (let row = 0; row < TILE; row++) pixels[row * TILE] = 0;
		context.putImageData(image, 0, 0);
		entry.painted = this.version;
		return entry.canvas;
	}

	// The range that fits what these parts of tiles hold: [{entry, rows: [a, b), columns: [c, d)}].
	fit(parts) {
		const histogram = new Float64Array(BINS);
		const width = CODES / BINS;
		const cells = parts.reduce((sum, { rows, columns }) => sum + (rows[1] - rows[0]) * (columns[1] - columns[0]), 0);
		const stride = Math.max(1, Math.floor(cells / SAMPLES)) | 1; // odd, so that no column is always left out
		for (const { entry, rows, columns } of parts) {
			const visible = visibleOf(this.series, entry.level, entry.row);
			const first = this.hide && entry.column === 0 ? Math.max(1, columns[0]) : columns[0];
			const wide = columns[1] - first;
			for (let at = 0; at < wide * (rows[1] - rows[0]); at += stride) {
				const row = rows[0] + Math.floor(at / wide);
				const code = entry.codes[row * TILE + first + (at % wide)];
				if (code) histogram[Math.floor(shownCode(code, row, entry, { scale: this.scale, visible }) / width)]++;
			}
		}
		const found = rangeOf(histogram);
		if (!found) return null;
		if (this.scale === 'uniform') {
			const far = Math.max(Math.abs(found.low - EVEN), Math.abs(found.high - EVEN), PER_OCTAVE / 2);
			const reach = Math.min(EVEN - 1, Math.ceil(far / SNAP) * SNAP);
			return { low: EVEN - reach, high: EVEN + reach };
		}
		const high = Math.min(65535, Math.ceil(found.high / SNAP) * SNAP);
		return { low: Math.max(1, Math.min(Math.floor(found.low / SNAP) * SNAP, high - SNAP)), high };
	}

	// The range when one of its ends is put at a code; relative to even, both ends move alike.
	moved(end, code) {
		const reach = Math.abs(code - EVEN);
		if (this.scale === 'uniform') return [EVEN - reach, EVEN + reach];
		return end ? [Math.min(this.low, code), code] : [code, Math.max(this.high, code)];
	}

	between([first, last]) {
		const low = clamp(Math.round(first), 1, CODES - 1 - SNAP);
		return { low, high: clamp(Math.round(last), low + SNAP, CODES - 1) };
	}

	// The words at the two ends of the legend.
	get ends() {
		if (this.scale === 'uniform') {
			const times = (code) => `${number(2 ** ((code - EVEN) / (PER_OCTAVE / 2)), 2)}×`;
			return [times(this.low), times(this.high)];
		}
		return [this.scale === 'linear' ? '0' : number(weightOf(this.low), 2), number(weightOf(this.high), 2)];
	}

	get masked() {
		return css(MASKED[this.dark ? 'dark' : 'light']);
	}

	// The colours from the least to the most, for CSS.
	get gradient() {
		return `linear-gradient(to right, ${Array.from({ length: 33 }, (_, i) => css(colourAt(this.map, this.dark, i / 32)))})`;
	}
}
