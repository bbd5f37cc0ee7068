// Draws the map: tiles, tokens on both axes, the curves beside them, and what is chosen. On a canvas and on paper alike.

import { inkOn } from './color.js';
import { shownCode, visibleOf } from './look.js';
import { weightOf } from './numbers.js';
import { TILE } from './tiles.js';

const LABELLED = 12; // pixels a weight needs for its token to be written
const WRITTEN = 38; // and for its number
const APART = 64; // pixels between the numbers of an axis
const MONO = 'ui-monospace, Menlo, Consolas, monospace';
const SMALL = '11px system-ui, sans-serif';

// Where the matrix stands in a picture, and the room around it for words and curves.
export function roomOf(width, height) {
	const [left, top, right, bottom] = width < 480 ? [66, 60, 34, 34] : [92, 76, 48, 44];
	return { left, top, right, bottom, width: Math.max(40, width - left - right), height: Math.max(40, height - top - bottom) };
}

// The tiles of a level that can be seen, those nearest to the middle first.
export function tilesInSight(viewport, level, pool) {
	const { keys, queries } = viewport.seen;
	const size = TILE * 2 ** level;
	const found = [];
	for (let row = Math.floor(queries[0] / size); row * size < queries[1]; row++) {
		for (let column = Math.floor(keys[0] / size); column * size < keys[1]; column++) found.push({ pool, level, row, column });
	}
	const middle = ([first, end]) => (first + end) / 2 / size - 0.5;
	const far = ({ row, column }) => Math.hypot(row - middle(queries), column - middle(keys));
	return found.sort((one, other) => far(one) - far(other));
}

function paintTiles(context, { viewport, tiles, look, level, levels, pool, ratio, room }) {
	const snap = (value) => Math.round(value * ratio) / ratio;
	const size = TILE * 2 ** level;
	for (const tile of tilesInSight(viewport, level, pool)) {
		const entry = tiles.get(tile) ?? tiles.standIn(tile, levels);
		if (!entry) continue;
		const [key, query] = [tile.column * size, tile.row * size];
		const [keys, queries] = [Math.min(size, viewport.keys - key), Math.min(size, viewport.queries - query)];
		const cell = 2 ** entry.level;
		const [x, y] = [snap(room.left + viewport.left(key)), snap(room.top + viewport.top(query))];
		const [right, bottom] = [snap(room.left + viewport.left(key + keys)), snap(room.top + viewport.top(query + queries))];
		context.drawImage(look.paint(entry), key / cell - entry.column * TILE, query / cell - entry.row * TILE, keys / cell, queries / cell, x, y, right - x, bottom - y);
	}
}

function paintNumbers(context, { viewport, tiles, look, room, pool }) {
	const { keys, queries } = viewport.seen;
	context.font = `11px ${MONO}`;
	context.textAlign = 'center';
	for (let query = queries[0]; query < queries[1]; query++) {
		for (let key = keys[0]; key < keys[1]; key++) {
			const entry = tiles.get({ pool, level: 0, row: Math.floor(query / TILE), column: Math.floor(key / TILE) });
			const row = query % TILE;
			const code = entry?.codes[row * TILE + (key % TILE)];
			if (!code || (look.hide && key === 0)) continue;
			const pixel = look.table[shownCode(code, row, entry, { scale: look.scale, visible: visibleOf(look.series, 0, entry.row) })];
			const weight = weightOf(code);
			context.fillStyle = inkOn([pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255]);
			context.fillText(weight >= 0.995 ? '1' : weight >= 0.005 ? weight.toFixed(2).slice(1) : '·', room.left + viewport.left(key + 0.5), room.top + viewport.top(query + 0.5));
		}
	}
}

function fitted(context, text, room) {
	const signs = [...text];
	let shown = text;
	while (signs.length > 1 && context.measureText(shown).width > room) {
		signs.pop();
		shown = `${signs.join('')}…`;
	}
	return shown;
}

// One axis, of queries at the left or of keys above: tokens where there is room for them, else numbers.
function paintAxis(context, { viewport, room, colours, label, ...scene }, of) {
	const down = of === 'query';
	const { cell } = viewport;
	const [first, end] = viewport.seen[down ? 'queries' : 'keys'];
	const [low, high, beside] = down ? [room.top, room.top + room.height, room.left] : [room.left, room.left + room.width, room.top];
	const middle = (index) => (down ? room.top + viewport.top(index + 0.5) : room.left + viewport.left(index + 0.5));
	const word = (index, strong) => {
		const at = middle(index);
		const text = label(of, index);
		if (text === undefined || at < low - 1 || at > high + 1) return;
		context.save();
		context.translate(down ? room.left : at, down ? at : room.top);
		if (!down) context.rotate(-Math.PI / 2);
		context.font = `${strong ? '600 12' : Math.min(12, cell - 1)}px ${MONO}`;
		context.fillStyle = strong ? colours.accent : colours.ink;
		context.textAlign = down ? 'right' : 'left';
		context.fillText(fitted(context, text.trim() || '␣', beside - 14), down ? -6 : 6, 0);
		context.restore();
	};
	const chosen = scene[of];
	if (cell >= LABELLED) {
		for (let index = first; index < end; index++) word(index, index === chosen);
		return;
	}
	const power = 10 ** Math.floor(Math.log10(APART / cell));
	const step = Math.max(1, [1, 2, 5, 10].find((many) => many * power * cell >= APART) * power);
	context.font = SMALL;
	context.fillStyle = colours.soft;
	for (let index = Math.ceil(first / step) * step; index < end; index += step) {
		const at = middle(index);
		context.fillRect(down ? beside - 5 : Math.round(at), down ? Math.round(at) : beside - 5, down ? 4 : 1, down ? 1 : 4);
		if (chosen !== null && Math.abs(at - middle(chosen)) < APART / 2) continue;
		context.textAlign = down ? 'right' : index ? 'center' : 'left';
		if (down) context.fillText(index, beside - 8, at);
		else context.fillText(index, index ? at : room.left, beside - 13);
	}
	if (chosen !== null && chosen >= first && chosen < end) word(chosen, true);
}

// The smallest and largest value that fall on each pixel: a single spike is seen at any length.
function envelope(values, from, perPixel, pixels) {
	const [low, high] = [new Float32Array(pixels), new Float32Array(pixels)];
	for (let pixel = 0; pixel < pixels; pixel++) {
		const first = Math.floor(from + pixel * perPixel);
		const last = Math.min(values.length, Math.max(first + 1, Math.ceil(from + (pixel + 1) * perPixel)));
		low[pixel] = high[pixel] = values[first];
		for (let index = first + 1; index < last; index++) {
			if (values[index] < low[pixel]) low[pixel] = values[index];
			if (values[index] > high[pixel]) high[pixel] = values[index];
		}
	}
	return { low, high };
}

// A curve along an axis, `cell` pixels for a value: put(pixel, from, size) adds a stroke to the path.
export function paintCurve(context, values, from, cell, length, room, put) {
	const pixels = Math.max(1, Math.floor(Math.min(length, (values.length - from) * cell)));
	const { low, high } = envelope(values, from, 1 / cell, pixels);
	const scale = room / Math.max(1e-12, ...high);
	context.beginPath();
	high.forEach((value, pixel) => {
		const start = Math.min(low[pixel] * scale, Math.max(0, value * scale - 1.5));
		put(pixel, start, Math.max(1, value * scale - start));
	});
	context.fill();
	context.beginPath();
	high.forEach((value, pixel) => put(pixel, 0, value * scale));
	context.globalAlpha = 0.25;
	context.fill();
	context.globalAlpha = 1;
}

function paintSeries(context, { viewport, room, series, colours, look }) {
	const [right, bottom] = [room.left + room.width + 4, room.top + room.height + room.bottom];
	context.fillStyle = colours.sunk;
	context.fillRect(room.left, bottom - room.bottom + 4, room.width, room.bottom - 4);
	context.fillRect(right, room.top, room.right - 4, room.height);
	context.fillStyle = colours.curve;
	if (series) {
		const share = look.hide ? series.share.map((value, index) => (index ? value : 0)) : series.share;
		paintCurve(context, share, viewport.x, viewport.cell, room.width, room.bottom - 8, (pixel, from, size) => context.rect(room.left + pixel, bottom - from - size, 1, size));
		paintCurve(context, series.entropy, viewport.y, viewport.cell, room.height, room.right - 8, (pixel, from, size) => context.rect(right + from, room.top + pixel, size, 1));
	}
	context.fillStyle = colours.soft;
	context.font = SMALL;
	context.textAlign = 'right';
	context.fillText('received', room.left - 6, bottom - room.bottom / 2 + 2);
	context.textAlign = 'left';
	context.fillText('looked at →', 4, 10);
	context.fillText('looks ↓', 4, 26);
	context.save();
	context.translate(right + room.right / 2 - 2, room.top - 6);
	context.rotate(-Math.PI / 2);
	context.fillText('entropy', 0, 0);
	context.restore();
}

function paintChosen(context, { viewport, room, colours, query, key, matches }) {
	const size = Math.max(1, viewport.cell);
	const [x, y] = [room.left + viewport.left(key), room.top + viewport.top(query)];
	context.fillStyle = context.strokeStyle = colours.accent;
	for (const [first, last] of matches) {
		const wide = Math.max(2, (last + 1 - first) * viewport.cell);
		context.fillRect(room.left + viewport.left(first), room.top, wide, 3);
		context.fillRect(room.left, room.top + viewport.top(first), 3, wide);
	}
	context.lineWidth = viewport.cell > 6 ? 1.5 : 1;
	if (query !== null) context.strokeRect(room.left - 2, y, Math.min(room.width, viewport.left(viewport.keys)) + 4, size);
	context.globalAlpha = 0.65;
	if (key !== null) context.strokeRect(x, room.top - 2, size, Math.min(room.height, viewport.top(viewport.queries)) + 4);
	context.globalAlpha = 1;
	context.lineWidth = 2.5;
	if (query !== null && key !== null && size >= 4) context.strokeRect(x, y, size, size);
}

// The whole picture. scene: {width, height, ratio, room, viewport, tiles, look, level, levels, pool, label(of, index),
// series, colours, query, key, matches}.
export function paintScene(context, scene) {
	const { room, colours, viewport } = scene;
	context.fillStyle = colours.panel;
	context.fillRect(0, 0, scene.width, scene.height);
	context.textBaseline = 'middle';
	context.save();
	context.beginPath();
	context.rect(room.left, room.top, room.width, room.height);
	context.clip();
	context.fillStyle = colours.sunk;
	context.fillRect(room.left, room.top, viewport.left(viewport.keys), viewport.top(viewport.queries));
	context.imageSmoothingEnabled = false;
	paintTiles(context, scene);
	if (viewport.cell >= WRITTEN && scene.level === 0) paintNumbers(context, scene);
	paintChosen(context, scene);
	context.restore();
	paintAxis(context, scene, 'query');
	paintAxis(context, scene, 'key');
	paintSeries(context, scene);
}
