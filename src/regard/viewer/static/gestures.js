// Mouse, pen and fingers on the map: drag, wheel, pinch, double click. Positions are pixels of the element.

const LINE = 16; // pixels that a wheel's line stands for
const STILL = 4; // a press that moves less is a click

export function gestures(element, { pan, zoom, hover, press, leave }) {
	const fingers = new Map();
	let moved = 0;

	const place = (event) => {
		const box = element.getBoundingClientRect();
		return { x: event.clientX - box.left, y: event.clientY - box.top };
	};
	const middle = () => {
		const [one, two] = [...fingers.values()];
		return { x: (one.x + two.x) / 2, y: (one.y + two.y) / 2, apart: Math.hypot(one.x - two.x, one.y - two.y) };
	};
	const down = (event) => {
		if (event.button !== 0) return;
		element.setPointerCapture(event.pointerId);
		fingers.set(event.pointerId, place(event));
		if (fingers.size === 1) moved = 0;
	};
	const move = (event) => {
		const now = place(event);
		const before = fingers.get(event.pointerId);
		if (!before) return void hover(now);
		if (fingers.size === 1) {
			moved += Math.hypot(now.x - before.x, now.y - before.y);
			if (moved >= STILL) pan(before.x - now.x, before.y - now.y);
			fingers.set(event.pointerId, now);
		} else if (fingers.size === 2) {
			const old = middle();
			fingers.set(event.pointerId, now);
			const next = middle();
			moved = STILL;
			pan(old.x - next.x, old.y - next.y);
			if (old.apart > 0) zoom(next.apart / old.apart, next);
		}
	};
	const up = (event) => {
		if (!fingers.delete(event.pointerId)) return;
		if (event.type === 'pointerup' && moved < STILL && fingers.size === 0) press(place(event));
	};
	const wheel = (event) => {
		event.preventDefault();
		const unit = event.deltaMode === 1 ? LINE : event.deltaMode === 2 ? element.clientHeight : 1;
		if (event.shiftKey && !event.ctrlKey) pan((event.deltaX || event.deltaY) * unit, 0);
		else zoom(2 ** ((-event.deltaY * unit) / (event.ctrlKey ? 60 : 240)), place(event));
	};
	const twice = (event) => {
		event.preventDefault();
		zoom(event.shiftKey ? 0.5 : 2, place(event));
	};
	element.style.touchAction = 'none';
	const all = { pointerdown: down, pointermove: move, pointerup: up, pointercancel: up, wheel, dblclick: twice, pointerleave: leave };
	for (const [name, call] of Object.entries(all)) element.addEventListener(name, call, { passive: false });
}
