// Colour maps, made here from a few points in OKLCH: lightness changes evenly and always in one direction, so a map reads
// the same in print and for every kind of colour vision. No table is copied from anywhere.

import { canvasOf, clamp } from './dom.js';
import { CODES, PER_OCTAVE } from './numbers.js';

const STEPS = 1024;

// [lightness, chroma, hue] at even distances; the first is the smallest weight.
const EMBER = [[0.985, 0.012, 85], [0.87, 0.1, 75], [0.72, 0.16, 52], [0.5, 0.15, 38], [0.24, 0.07, 30]];
const MAPS = {
	weight: { dark: [[0.17, 0.05, 285], [0.36, 0.13, 300], [0.56, 0.17, 355], [0.75, 0.15, 45], [0.95, 0.09, 95]], light: EMBER },
	diverging: {
		dark: [[0.82, 0.12, 215], [0.5, 0.09, 235], [0.2, 0.012, 285], [0.56, 0.14, 45], [0.9, 0.11, 85]],
		light: [[0.34, 0.1, 250], [0.68, 0.09, 230], [0.985, 0.01, 85], [0.72, 0.15, 55], [0.34, 0.1, 35]],
	},
	text: { dark: [[0.27, 0.03, 60], [0.42, 0.1, 45], [0.6, 0.15, 48], [0.78, 0.14, 68], [0.93, 0.08, 90]], light: EMBER },
};

export const MASKED = { light: [196, 196, 196], dark: [84, 84, 84] };

const ramps = new Map();

// The way through the points of a map, as sRGB bytes: straight in OKLab, so that a change of hue goes through no rainbow.
function rampOf(name, dark) {
	const points = MAPS[name][dark ? 'dark' : 'light'];
	if (!ramps.has(points)) {
		const flat = points.map(([l, c, hue]) => [l, c * Math.cos((hue * Math.PI) / 180), c * Math.sin((hue * Math.PI) / 180)]);
		const context = canvasOf(STEPS, 1).getContext('2d', { willReadFrequently: true });
		for (let step = 0; step < STEPS; step++) {
			const place = (step / (STEPS - 1)) * (points.length - 1);
			const first = Math.min(Math.floor(place), points.length - 2);
			context.fillStyle = `oklab(${flat[first].map((value, i) => (value + (place - first) * (flat[first + 1][i] - value)).toFixed(5)).join(' ')})`;
			context.fillRect(step, 0, 1, 1);
		}
		const { data } = context.getImageData(0, 0, STEPS, 1);
		ramps.set(points, Array.from({ length: STEPS }, (_, step) => [...data.subarray(4 * step, 4 * step + 3)]));
	}
	return ramps.get(points);
}

const part = (colours, share) => colours[Math.round(clamp(share, 0, 1) * (STEPS - 1))];

// The colour of a part of the range, 0 to 1.
export const colourAt = (name, dark, share) => part(rampOf(name, dark), share);

export function css([red, green, blue]) {
	return `rgb(${red}, ${green}, ${blue})`;
}

// Where a weight stands in the range, 0 to 1: by its logarithm, or linearly.
function partOf(code, { low, high, log }) {
	if (log) return (code - low) / Math.max(1, high - low);
	const top = 2 ** ((high - 65535) / PER_OCTAVE);
	return 2 ** ((code - 65535) / PER_OCTAVE) / top;
}

// How a code is painted, as a canvas pixel (ABGR in a 32-bit word). look: {map, dark, low, high, log}.
export function painter(look) {
	const colours = rampOf(look.map, look.dark);
	const pixel = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
	return (code) => pixel(code ? part(colours, partOf(code, look)) : MASKED[look.dark ? 'dark' : 'light']);
}

// The same for every code.
export function colourTable(look) {
	const paint = painter(look);
	return new Uint32Array(CODES).map((_, code) => paint(code));
}

// A colour for each of several heads, apart from each other in hue and alike in strength.
export function headColour(index, dark) {
	return `oklch(${dark ? 0.78 : 0.5} 0.15 ${(255 + index * 137.5) % 360})`;
}

// Black or white, whichever reads better on a colour.
export function inkOn([red, green, blue]) {
	const linear = (byte) => (byte / 255 <= 0.04045 ? byte / 255 / 12.92 : ((byte / 255 + 0.055) / 1.055) ** 2.4);
	const luminance = 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
	return luminance > 0.179 ? '#000' : '#fff';
}

// The ground and the ink of text that gets a share of the weight, as far as it can be read on either page.
export function heat(share, dark) {
	const colour = colourAt('text', dark, dark ? Math.sqrt(share) : 0.05 + 0.6 * Math.sqrt(share));
	return [css(colour), inkOn(colour)];
}

// The lowest and highest code worth a colour: what lies between the first and the 99.9th hundredth of those seen.
export function rangeOf(histogram) {
	let total = 0;
	for (let bin = 0; bin < histogram.length; bin++) total += histogram[bin];
	if (!total) return null;
	const width = CODES / histogram.length;
	const at = (share) => {
		let left = share * total;
		for (let bin = 0; bin < histogram.length; bin++) {
			left -= histogram[bin];
			if (left < 0) return bin;
		}
		return histogram.length - 1;
	};
	const low = at(0.01) * width;
	const high = (at(0.999) + 1) * width - 1;
	return { low: Math.max(1, Math.min(low, high - PER_OCTAVE)), high: Math.min(CODES - 1, high) };
}
