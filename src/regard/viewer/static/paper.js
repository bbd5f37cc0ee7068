// The part of a 2D canvas that the map is drawn with, written down as SVG.

import { canvasOf } from './dom.js';

const SIGNS = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' };
const ANCHORS = { left: 'start', center: 'middle', right: 'end' };
const STATE = ['fillStyle', 'strokeStyle', 'lineWidth', 'font', 'textAlign', 'globalAlpha', 'open'];

function escaped(text) {
	// what XML cannot hold at all is left out
	return String(text).replace(/[\0-\x08\v\f\x0e-\x1f\ufffe\uffff]/g, '').replace(/[&<>"]/g, (sign) => SIGNS[sign]);
}

const short = (value) => +value.toFixed(2);
const place = (x, y, width, height) => `x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}"`;

export class SvgPaper {
	constructor({ width, height }, title) {
		Object.assign(this, { width, height, title, parts: [], path: '', clips: 0, saved: [], open: 0, globalAlpha: 1 });
		this.measuring = canvasOf(1, 1).getContext('2d');
	}

	save() {
		this.saved.push(STATE.map((name) => this[name]));
		this.open = 0;
	}

	restore() {
		this.parts.push('</g>'.repeat(this.open));
		this.saved.pop().forEach((value, i) => (this[STATE[i]] = value));
	}

	group(attribute) {
		this.parts.push(`<g ${attribute}>`);
		this.open++;
	}

	translate(x, y) {
		this.group(`transform="translate(${short(x)} ${short(y)})"`);
	}

	rotate(angle) {
		this.group(`transform="rotate(${short((angle * 180) / Math.PI)})"`);
	}

	beginPath() {
		this.path = '';
	}

	rect(x, y, width, height) {
		this.path += `M${short(x)} ${short(y)}h${short(width)}v${short(height)}h${short(-width)}z`;
	}

	clip() {
		this.parts.push(`<clipPath id="clip${++this.clips}"><path d="${this.path}"/></clipPath>`);
		this.group(`clip-path="url(#clip${this.clips})"`);
	}

	shape(tag, attributes) {
		this.parts.push(`<${tag} ${attributes}${this.globalAlpha < 1 ? ` opacity="${short(this.globalAlpha)}"` : ''}/>`);
	}

	fill() {
		this.shape('path', `d="${this.path}" fill="${escaped(this.fillStyle)}"`);
	}

	fillRect(...box) {
		this.shape('rect', `${place(...box)} fill="${escaped(this.fillStyle)}"`);
	}

	strokeRect(...box) {
		this.shape('rect', `${place(...box)} fill="none" stroke="${escaped(this.strokeStyle)}" stroke-width="${short(this.lineWidth)}"`);
	}

	fillText(text, x, y) {
		const style = `font:${escaped(this.font)};white-space:pre`;
		this.parts.push(`<text x="${short(x)}" y="${short(y)}" text-anchor="${ANCHORS[this.textAlign]}" dominant-baseline="central" style="${style}" fill="${escaped(this.fillStyle)}">${escaped(text)}</text>`);
	}

	measureText(text) {
		this.measuring.font = this.font;
		return this.measuring.measureText(text);
	}

	drawImage(image, sx, sy, sw, sh, ...box) {
		const part = canvasOf(Math.max(1, Math.ceil(sw)), Math.max(1, Math.ceil(sh)));
		part.getContext('2d').drawImage(image, sx, sy, sw, sh, 0, 0, part.width, part.height);
		this.shape('image', `${place(...box)} preserveAspectRatio="none" style="image-rendering:pixelated" href="${part.toDataURL()}"`);
	}

	toString() {
		const [width, height] = [short(this.width), short(this.height)];
		return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" role="img"><title>${escaped(this.title)}</title>${this.parts.join('')}</svg>\n`;
	}
}
