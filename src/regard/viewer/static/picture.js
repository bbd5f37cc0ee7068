// An image model's patches on the picture they were cut from.

import { canvasOf, clamp, h, replace } from './dom.js';
import { colourAt, css } from './color.js';
import { number } from './numbers.js';

const LARGEST = 340; // pixels of the longer side on screen

export function createPictures(app) {
	const element = h('div.pictures');
	const said = h('p.note', { role: 'status' });
	let canvas = null;
	let image = null; // null: not asked for; false: there is none
	let weights = null;
	let chosen = null;
	let hover = null;

	const grid = () => {
		const [rows, columns] = app.layer.patches;
		return { rows, columns, first: app.layer.key_len - rows * columns };
	};
	const box = (index) => {
		const { rows, columns, first } = grid();
		const [row, column] = [Math.floor((index - first) / columns), (index - first) % columns];
		return [(column * canvas.width) / columns, (row * canvas.height) / rows, canvas.width / columns, canvas.height / rows];
	};
	const draw = () => {
		if (!canvas || !app.layer.patches) return;
		const { rows, columns, first } = grid();
		const context = canvas.getContext('2d');
		context.fillStyle = app.colours.sunk;
		context.fillRect(0, 0, canvas.width, canvas.height);
		const shown = image && !app.state.batch; // the picture is that of the first row
		if (shown) context.drawImage(image, 0, 0, canvas.width, canvas.height);
		const values = weights?.values.subarray(first, first + rows * columns) ?? [];
		const top = Math.max(...values, 0);
		context.globalAlpha = shown ? 0.72 : 1;
		values.forEach((value, i) => {
			context.fillStyle = css(colourAt('weight', true, top > 0 ? Math.sqrt(value / top) : 0));
			context.fillRect(...box(first + i));
		});
		context.globalAlpha = 1;
		context.lineWidth = 3;
		for (const [index, colour] of [[hover, app.colours.edge], [chosen, app.colours.accent]]) {
			if (index === null || index < first) continue;
			const [x, y, wide, high] = box(index);
			context.strokeStyle = colour;
			context.strokeRect(x + 1.5, y + 1.5, wide - 3, high - 3);
		}
	};
	const patchAt = (event) => {
		const { rows, columns, first } = grid();
		const room = canvas.getBoundingClientRect();
		const place = (part, many) => clamp(Math.floor(part * many), 0, many - 1);
		return first + place((event.clientY - room.top) / room.height, rows) * columns + place((event.clientX - room.left) / room.width, columns);
	};
	const choose = (index) => app.choose(app.state.text === 'to' ? { query: index, key: null } : { key: index, query: null });
	const point = (index) => {
		hover = index;
		draw();
		if (index === null) return;
		const weight = weights ? `: weight ${number(weights.values[index])}` : '';
		said.textContent = `${app.tokens('key').label(index) ?? `patch ${index}`}${weight}`;
	};
	const keyed = (event) => {
		const { rows, columns, first } = grid();
		const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
		if (!by) return;
		event.preventDefault();
		choose(clamp((chosen ?? first) + by, first, first + rows * columns - 1));
	};
	return {
		element,
		async build() {
			const { patches } = app.layer;
			element.hidden = !patches;
			if (!patches) return;
			if (app.info.picture && image === null) {
				image = false;
				const { meta, data } = await app.call('picture', {});
				const drawn = canvasOf(meta.width, meta.height);
				drawn.getContext('2d').putImageData(new ImageData(new Uint8ClampedArray(data), meta.width, meta.height), 0, 0);
				image = drawn;
			}
			const [wide, high] = image ? [image.width, image.height] : [patches[1], patches[0]];
			const factor = LARGEST / Math.max(wide, high);
			canvas = h('canvas', { width: Math.round(wide * factor), height: Math.round(high * factor), tabindex: 0, role: 'application', label: `The picture in ${patches.join(' × ')} patches; arrow keys choose a patch`, onclick: (event) => choose(patchAt(event)), onpointermove: (event) => point(patchAt(event)), onpointerleave: () => point(null), onkeydown: keyed });
			replace(element, canvas, said);
			draw();
		},
		shade(shown, index) {
			[weights, chosen] = [shown, index];
			draw();
		},
	};
}
