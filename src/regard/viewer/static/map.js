// The map of one head: the whole matrix, panned and zoomed down to single weights, with what stands under the pointer.

import { button, checkbox, choice, clamp, h, meter, perFrame, replace, token } from './dom.js';
import { gestures } from './gestures.js';
import { Look } from './look.js';
import { CODES, number, percent, plural } from './numbers.js';
import { paintScene, roomOf, tilesInSight } from './scene.js';
import { TILE, Tiles } from './tiles.js';
import { Viewport } from './viewport.js';

const RANGE_WAIT = 120; // ms without a new tile before the range is fitted to what is seen
const HOVER_WAIT = 40;
const NARROW = 60; // pixels that the shorter side of a map has at first, if it is much shorter than the other
const TURN = 80; // pixels that Shift and an arrow move
const AT_REST = 'Point at the map to read a weight. Drag to move, turn the wheel or pinch to zoom, click to choose a token.';

export function createMap(app) {
	const { store, state } = app;
	const look = new Look();
	const canvas = h('canvas', { tabindex: 0, role: 'application', 'aria-describedby': 'map-keys' });
	const frame = h('div.map', canvas);
	const readout = h('p.readout');
	const progress = h('div.note', { hidden: true });
	const title = h('h2', { id: 'map-title' });
	const about = h('p.about');
	const tag = h('span.tag');
	let viewport = null;
	let tiles = null;
	let series = null;
	let matches = [];
	let shown = null; // the head whose tiles these are
	let fitted = null; // what the range was fitted to
	let timer = 0;
	let manner = 'quietly'; // how the next weight is read: aloud after a key
	const jobs = new Set();

	// ---- drawing
	const ratio = () => devicePixelRatio;
	const level = () => viewport.level(ratio(), app.layer.levels);
	const size = () => frame.getBoundingClientRect();
	const scene = () => {
		const { width, height } = size();
		return {
			width, height, ratio: ratio(), room: roomOf(width, height), viewport, tiles, look, level: level(), levels: app.layer.levels, pool: state.pool, series,
			label: (of, index) => app.tokens(of).label(index), colours: app.colours, query: state.query, key: state.key, matches,
		};
	};
	const draw = () => {
		const { width, height } = size();
		if (!tiles || !width) return;
		const room = roomOf(width, height);
		const { query_len: queries, key_len: keys, levels } = app.layer;
		if (viewport?.queries !== queries || viewport.keys !== keys) {
			viewport = new Viewport(queries, keys, room.width, room.height);
			if (state.at) viewport.place(...state.at);
			else if (viewport.whole * Math.min(queries, keys) < NARROW) viewport.place(0, 0, NARROW / Math.min(queries, keys));
			rest();
		} else viewport.resize(room.width, room.height);
		const [wide, high] = [Math.round(width * ratio()), Math.round(height * ratio())];
		if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
		const overview = { pool: state.pool, level: levels - 1, row: 0, column: 0 };
		tiles.want([...(tiles.get(overview) ? [] : [overview]), ...tilesInSight(viewport, level(), state.pool)]);
		const context = canvas.getContext('2d', { alpha: false });
		context.setTransform(ratio(), 0, 0, ratio(), 0, 0);
		paintScene(context, scene());
		const seen = [viewport.x, viewport.y, viewport.cell, look.version, tiles.version, shown].join();
		if (seen === fitted) return;
		fitted = seen;
		clearTimeout(timer);
		timer = setTimeout(fit, RANGE_WAIT);
	};
	const redraw = perFrame(draw);
	// The range of colours that suits what is in sight.
	const fit = () => {
		if (!viewport || !tiles) return;
		const cell = 2 ** level();
		const cut = ([first, end], at) => [Math.max(0, Math.floor(first / cell) - at * TILE), Math.min(TILE, Math.ceil(end / cell) - at * TILE)];
		const { keys, queries } = viewport.seen;
		const entries = tilesInSight(viewport, level(), state.pool).map((tile) => tiles.get(tile)).filter(Boolean);
		const found = state.range ? look.between(state.range) : look.fit(entries.map((entry) => ({ entry, rows: cut(queries, entry.row), columns: cut(keys, entry.column) })));
		if (found && look.set(found)) redraw();
		bar.style.background = look.gradient;
		ends.forEach((end, i) => {
			end.textContent = look.ends[i];
			sliders[i].hidden = !state.range;
			sliders[i].value = [look.low, look.high][i];
			sliders[i].setAttribute('aria-valuetext', look.ends[i]);
		});
		swatch.style.background = look.masked;
	};

	// ---- what is shown of a head
	const watch = async (job, signal) => {
		if (jobs.has(job)) return;
		jobs.add(job);
		const tell = ({ state: now, done, total }) => {
			progress.hidden = now !== 'running';
			const share = total ? done / total : 0;
			const stop = button('Stop', () => app.stop(job), { class: 'plain' });
			replace(progress, `A preview from sampled tokens until the exact map is ready: ${percent(share)} `, meter(share), stop);
			if (tiles.outdate(now === 'done' ? Infinity : done)) redraw();
		};
		try {
			await app.follow(job, tell, signal);
			await loadSeries(signal);
		} finally {
			progress.hidden = true;
			jobs.delete(job);
		}
	};
	const loadSeries = async (signal) => {
		const { meta, data } = await app.call('series', app.head, signal);
		if (meta.job) watch(meta.job, signal).catch(app.fault);
		if (!meta.ready) return;
		const { query_len: q, key_len: k } = meta;
		const part = (from, length) => new Float32Array(data).subarray(from, from + length);
		const viewers = part(2 * q + k, k);
		series = { entropy: part(0, q), visible: part(q, q), share: part(2 * q, k).map((value, i) => value / Math.max(1, viewers[i])) };
		look.set({ series });
		redraw();
	};
	const name = () => [app.reading, app.layer.query_len, state.layer, state.head].join();
	const open = app.latest(async (signal) => {
		shown = name();
		tiles?.clear();
		series = null;
		look.set({ series });
		progress.hidden = true;
		const fetchTile = async (tile, stop) => {
			const { meta, data } = await app.call('tile', { ...app.head, ...tile }, stop);
			if (meta.job && !signal.aborted) watch(meta.job, signal).catch(app.fault);
			return { codes: new Uint16Array(data), exact: meta.exact };
		};
		tiles = new Tiles(fetchTile, redraw, app.fault);
		redraw();
		await loadSeries(signal);
	});
	const describe = () => {
		const { layer } = app;
		const found = app.summary(state.layer, state.head);
		title.textContent = `Layer ${state.layer}, head ${state.head}`;
		tag.textContent = [found && `${found.kind} ${percent(found.score)}`, ...layer.traits].filter(Boolean).join(' · ');
		canvas.setAttribute('aria-label', `Map of the attention weights of layer ${state.layer}, head ${state.head}: ${plural(layer.query_len, 'row')}, ${plural(layer.key_len, 'column')}`);
		about.textContent = `Each row is a token that looks, each column a token looked at; a row’s weights ${layer.sink ? 'and the sink’s ' : ''}add up to 1, and ${app.dark ? 'brighter' : 'stronger'} is more.`;
	};

	// ---- reading a weight
	const tellCell = (meta, query, key) => {
		const [from, to] = [token(meta.query_label, query), token(meta.key_label, key)];
		if (meta.hidden) return [from, ' may not look at ', to, ': the mask hides it.'];
		const times = meta.uniform ? ` · ${number(meta.weight / meta.uniform, 2)}× an even share among ${plural(meta.visible, 'key')}` : '';
		return [from, ' looks at ', to, ' with weight ', h('b', { data: { weight: meta.weight } }, number(meta.weight)), h('br'), `score ${number(meta.score)}${times} · distance ${meta.distance}`];
	};
	const read = app.latest(async (signal, at, aloud) => {
		const cell = 2 ** level();
		let within = '';
		if (!aloud) await new Promise((done) => setTimeout(done, HOVER_WAIT));
		if (signal.aborted) return;
		if (cell > 1 && !aloud) {
			const range = (index, length) => [Math.floor(index / cell) * cell, Math.min(length, (Math.floor(index / cell) + 1) * cell)];
			const [queries, keys] = [range(at.query, viewport.queries), range(at.key, viewport.keys)];
			const { meta } = await app.call('cell', { ...app.head, queries, keys }, signal);
			if (!meta.hidden) at = { query: meta.query, key: meta.key };
			within = `The largest of ${(queries[1] - queries[0]) * (keys[1] - keys[0])} weights here: `;
		}
		const { meta } = await app.call('cell', { ...app.head, query: at.query, key: at.key }, signal);
		replace(readout, within, tellCell(meta, at.query, at.key));
		if (aloud === 'aloud') app.announce(readout.textContent);
	}, () => replace(readout));
	const rest = () => {
		if (state.query !== null && state.key !== null) read(state, manner);
		else replace(readout, AT_REST);
		manner = 'quietly';
	};

	// ---- moving
	const settled = () => {
		store.set({ at: viewport.isWhole ? null : [viewport.x, viewport.y, viewport.cell] });
		redraw();
	};
	const act = (move) => (...given) => {
		if (!viewport) return;
		move(...given);
		settled();
	};
	const inside = ({ x, y }) => {
		const room = roomOf(size().width, size().height);
		return [x - room.left, y - room.top];
	};
	gestures(canvas, {
		pan: act((dx, dy) => viewport.pan(dx, dy)),
		zoom: act((factor, at) => viewport.zoom(factor, ...inside(at))),
		hover: (at) => {
			const found = viewport?.at(...inside(at));
			canvas.style.cursor = found ? 'crosshair' : '';
			if (found) read(found);
		},
		press: (at) => {
			canvas.focus({ preventScroll: true });
			const found = viewport?.at(...inside(at));
			if (found) store.set(found);
		},
		leave: rest,
	});
	const step = act((rows, columns) => {
		const cell = 2 ** level();
		const { query, key } = state;
		const { queries, keys } = viewport.seen;
		const begun = query !== null && key !== null;
		const move = (index, by, length) => clamp(index + by * cell, 0, length - 1);
		const at = begun ? { query: move(query, rows, viewport.queries), key: move(key, columns, viewport.keys) } : { query: query ?? queries[0], key: key ?? keys[0] };
		viewport.show(at.query, at.key);
		manner = 'aloud';
		store.set(at);
	});
	const zoomBy = act((factor) => {
		const at = [viewport.left((state.key ?? -1) + 0.5), viewport.top((state.query ?? -1) + 0.5)];
		viewport.zoom(factor, ...(viewport.at(...at) ? at : []));
	});
	const whole = act(() => viewport.fit());
	const toWeights = act(() => {
		const { query, key } = state;
		viewport.zoom(Math.max(1, 18 / viewport.cell));
		if (query !== null || key !== null) viewport.show(query ?? key, key ?? query, true);
	});
	const panBy = act((rows, columns) => viewport.pan(columns * TURN, rows * TURN));
	canvas.addEventListener('keydown', (event) => {
		if (event.ctrlKey || event.metaKey || event.altKey) return;
		const far = event.key.startsWith('Page') ? 10 : 1;
		const arrow = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-far, 0], PageDown: [far, 0] }[event.key];
		const other = { '+': () => zoomBy(2), '=': () => zoomBy(2), '-': () => zoomBy(0.5), 0: whole, Home: whole, Enter: () => app.show('steps'), Escape: () => store.set({ query: null, key: null }) }[event.key];
		if (!arrow && !other) return;
		event.preventDefault();
		if (other) other();
		else if (event.shiftKey) panBy(...arrow);
		else step(...arrow);
	});

	// ---- controls
	const scale = choice('Scale', [['log', 'logarithmic'], ['linear', 'linear'], ['uniform', 'relative to even']], 'log', (value) => store.set({ scale: value, range: null }), 'Relative to even: how many times what each token would get if all were looked at alike');
	const pool = choice('Cells show', [['max', 'largest weight'], ['mean', 'mean weight']], 'max', store.put('pool'), 'What a pixel shows on which many weights fall');
	const hide = checkbox('Hide first token', store.put('hide'), 'Many heads rest on the first token when they find nothing to look at');
	const bar = h('span.ramp');
	const ends = [h('span'), h('span')];
	const automatic = checkbox('Automatic range', (on) => store.set({ range: on ? null : [look.low, look.high] }));
	const sliders = ['first', 'last'].map((which, end) => h('input', { type: 'range', min: 1, max: CODES - 1, step: 'any', hidden: true, label: `Weight of the ${which} colour`, oninput: ({ target }) => store.set({ range: look.moved(end, target.valueAsNumber) }) }));
	const swatch = h('span.swatch');

	// ---- search
	const found = h('span.tag', { role: 'status' });
	const field = h('input', { type: 'search', placeholder: 'Find a token', label: 'Find a token in the text', size: 14 });
	let at = 0;
	const jump = act((by) => {
		if (!matches.length) return;
		at = (at + by + matches.length) % matches.length;
		found.textContent = `${at + 1} of ${matches.total}`;
		const key = matches[at][0];
		const query = app.layer.cross || key >= viewport.queries ? null : key;
		viewport.zoom(Math.max(1, 14 / viewport.cell));
		viewport.show(query, key, true);
		store.set(query === null ? { key } : { query, key: null });
	});
	const search = app.latest(async (signal) => {
		matches = [];
		found.textContent = '';
		if (field.value) {
			const { meta } = await app.call('search', { of: 'key', layer: state.layer, text: field.value }, signal);
			matches = Object.assign(meta.matches, { total: meta.total });
			at = 0;
			found.textContent = matches.length ? '' : 'not found';
			jump(0);
		}
		redraw();
	});
	field.addEventListener('change', search);
	field.addEventListener('keydown', (event) => event.key === 'Enter' && matches.length && jump(event.shiftKey ? -1 : 1));

	const icon = (sign, label, press) => button(sign, press, { class: 'icon', label, title: label });
	const zooms = h('span.joined', { role: 'group', label: 'Zoom' }, icon('+', 'Zoom in', () => zoomBy(2)), icon('−', 'Zoom out', () => zoomBy(0.5)), icon('▣', 'Show the whole map', whole), icon('⊞', 'Zoom to single weights', toWeights));
	new ResizeObserver(redraw).observe(frame);
	return {
		element: h('section.panel.map-panel', { 'aria-labelledby': 'map-title' }, h('div.head-line', title, tag), about,
			h('div.tools', scale.element, pool.element, hide.element, zooms, h('span.find', field, h('span.joined', icon('‹', 'Previous match', () => jump(-1)), icon('›', 'Next match', () => jump(1))), found)),
			frame, progress,
			h('div.legend', h('span.ends', ends[0], sliders[0], bar, sliders[1], ends[1]), automatic.element, h('span', swatch, ' hidden by the mask'), h('span', 'Below: weight received, per token that may look. At the right: entropy, how widely each token looks.')),
			readout, h('p.hidden-words', { id: 'map-keys' }, 'Arrow keys move from weight to weight, Shift and arrows move the map, plus and minus zoom, 0 shows the whole map, Enter opens the steps.')),
		update(changed) {
			look.set({ scale: state.scale, dark: app.dark, hide: state.hide });
			scale.select.value = state.scale;
			pool.select.value = state.pool;
			hide.input.checked = state.hide;
			automatic.input.checked = !state.range;
			if (name() !== shown) open();
			if (changed.any('run', 'layer', 'head', 'summary', 'theme')) describe();
			if (changed.has('at') && viewport) {
				if (state.at) viewport.place(...state.at);
				else if (!viewport.isWhole) viewport.fit();
			}
			if (changed.any('scale', 'pool', 'hide', 'range', 'theme')) fit();
			if (changed.any('run', 'layer', 'head', 'query', 'key') && viewport) rest();
			redraw();
		},
		// Brings what was chosen elsewhere into sight.
		reveal: () => viewport?.isWhole || act(() => viewport.show(state.query, state.key))(),
		// The same picture again: for what is saved.
		paint: (context) => paintScene(context, { ...scene(), ratio: 1 }),
		size,
		seen: () => viewport.seen,
		// For whoever measures or tests the page: where a weight is on the canvas, its code and the colour of that code.
		probe(query, key) {
			const [row, column] = [query, key].map((index) => Math.floor(index / 2 ** level()));
			const entry = tiles.get({ pool: state.pool, level: level(), row: Math.floor(row / TILE), column: Math.floor(column / TILE) });
			const code = entry?.codes[(row % TILE) * TILE + (column % TILE)];
			const { room } = scene();
			return { x: room.left + viewport.left(key + 0.5), y: room.top + viewport.top(query + 0.5), code, pixel: look.table[code ?? 0], level: level() };
		},
	};
}
