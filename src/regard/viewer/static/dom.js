// Elements. What comes from outside enters the page as text, never as markup.

const shown = (children) => children.flat(Infinity).filter((child) => (child ?? false) !== false);

// h('tag.class', {property: value}?, ...children): `on...` listens, `style` and `data` set several at once,
// `label` is what a screen reader says.
export function h(tag, ...rest) {
	const [name, ...classes] = tag.split('.');
	const element = document.createElement(name);
	if (classes.length) element.className = classes.join(' ');
	for (const [key, value] of Object.entries(rest[0]?.constructor === Object ? rest.shift() : {})) {
		if ((value ?? false) === false) continue;
		if (key.startsWith('on')) element.addEventListener(key.slice(2), value);
		else if (key === 'style') for (const [property, v] of Object.entries(value)) element.style.setProperty(property, v);
		else if (key === 'data') Object.assign(element.dataset, value);
		else if (key === 'label') element.setAttribute('aria-label', value);
		else if (typeof element[key] === 'boolean') element[key] = value;
		else element.setAttribute(key, value === true ? '' : value);
	}
	element.append(...shown(rest));
	return element;
}

export function replace(element, ...children) {
	element.replaceChildren(...shown(children));
	return element;
}

export function button(label, press, properties) {
	return h('button', { type: 'button', onclick: press, ...properties }, label);
}

export function canvasOf(width, height) {
	return Object.assign(document.createElement('canvas'), { width, height });
}

// A labelled choice of [value, words] pairs.
export function choice(label, options, value, change, title) {
	const select = h('select', { label, onchange: () => change(select.value) });
	const set = (pairs, chosen) => {
		replace(select, pairs.map(([v, words]) => h('option', { value: v }, words)));
		select.value = chosen;
	};
	set(options, value);
	return { element: h('label.field', { title }, label, select), select, set };
}

export function checkbox(label, change, title) {
	const input = h('input', { type: 'checkbox', onchange: () => change(input.checked) });
	return { element: h('label.check', { title }, input, label), input };
}

// Buttons side by side of which one is pressed: [value, words] pairs.
export function switcher(label, options, change) {
	const buttons = options.map(([value, words]) => button(words, () => change(value), { data: { value } }));
	const set = (chosen) => buttons.forEach((one) => one.setAttribute('aria-pressed', one.dataset.value === chosen));
	return { element: h('span.joined', { role: 'group', label }, buttons), set };
}

export function row(first, cells, properties) {
	return h('tr', properties, h('th.word', { scope: 'row' }, first), cells);
}

// A table that scrolls by itself: headings in words, then rows.
export function table(label, head, rows) {
	const heading = (words, i) => h(!words ? 'td' : i ? 'th' : 'th.word', words ? { scope: 'col' } : {}, words);
	return h('div.scroll', { tabindex: 0, role: 'region', label }, h('table', h('thead', h('tr', head.map(heading))), h('tbody', rows)));
}

export function meter(share) {
	return h('span.meter', { 'aria-hidden': 'true' }, h('i', { style: { width: `${100 * share}%` } }));
}

export function token(label, index) {
	return [h('span.tok', label), index === undefined ? '' : ` (${index})`];
}

// One focus stop for a group of controls; arrows move inside it. `columns()` tells how many stand side by side.
export function roving(container, items, columns) {
	const settle = (to) => items().forEach((item) => (item.tabIndex = item === to ? 0 : -1));
	container.addEventListener('focusin', (event) => {
		if (items().includes(event.target)) settle(event.target);
	});
	container.addEventListener('keydown', (event) => {
		const all = items();
		const at = all.indexOf(document.activeElement);
		if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
		const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns(), Home: -at, End: all.length - 1 - at };
		const next = all[at + steps[event.key]];
		if (!next) return;
		event.preventDefault();
		next.focus();
	});
	return () => {
		const all = items();
		if (all.length && !all.some((item) => item.tabIndex === 0)) all[0].tabIndex = 0;
	};
}

export function clamp(value, low, high) {
	return Math.min(Math.max(value, low), high);
}

// Calls at most once per frame.
export function perFrame(call) {
	let waiting = 0;
	return () => {
		waiting ||= requestAnimationFrame(() => {
			waiting = 0;
			call();
		});
	};
}
