// Opens a text with a model, turns to another part of a long text, and has the model go on writing.

import { button, choice, h, replace } from './dom.js';
import { count, percent } from './numbers.js';

const TAIL = 60; // characters shown of what is being written

export function createOpen(app) {
	const bar = h('div.working', { hidden: true, role: 'status' });
	// Runs a job with its progress on screen; whoever stops it sees what there is.
	const work = app.latest(async (signal, params, name, arrived) => {
		bar.hidden = false;
		replace(bar, `${name}…`);
		try {
			const { meta } = await app.call('start', params, signal);
			const fill = h('div');
			const said = h('span');
			const track = h('div.bar', { role: 'progressbar', label: name, 'aria-valuemin': 0, 'aria-valuemax': 100 }, fill);
			replace(bar, said, track, button('Stop', () => app.stop(meta.job)));
			const told = ({ done, total, note, result }) => {
				const share = total ? done / total : 0;
				fill.style.width = `${100 * share}%`;
				track.setAttribute('aria-valuenow', Math.round(100 * share));
				said.textContent = `${name}${total ? `, ${percent(share)}` : ''}${note ? `: ${params.what === 'generate' ? `…${note.slice(-TAIL)}` : note}` : ''}`;
				if (result?.run !== undefined) arrived?.(result.run);
			};
			const ended = await app.follow(meta.job, told, signal);
			app.announce(`${name}: ${ended.meta.state}`);
			if (ended.meta.result?.run !== undefined) await app.openRun(ended.meta.result.run);
			return ended;
		} finally {
			if (!signal.aborted) bar.hidden = true;
		}
	});
	// A dialog of fields: [label, control, remark].
	const dialog = (title, about, fields, word, press) => {
		const go = () => press() !== false && element.close();
		const element = h('dialog', { label: title }, h('h2', title), h('p.note', about),
			fields.map(([label, input, remark]) => h(label ? 'label.block' : 'div', h('b', label), input, remark && h('small.tag', remark))),
			h('footer', button('Cancel', () => element.close()), button(word, go, { class: 'main' })));
		return element;
	};

	const fault = h('p.bad', { role: 'alert' });
	const words = h('textarea', { spellcheck: 'false', placeholder: 'Type or paste a text or some code', oninput: () => (source = null) });
	const model = h('select');
	const file = h('input', { type: 'file' });
	let source = null;
	file.addEventListener('change', async () => {
		const [chosen] = file.files;
		const most = app.info.limits.text_bytes;
		const large = chosen && chosen.size > most;
		fault.textContent = large ? `${chosen.name} has ${count(chosen.size)} bytes; at most ${count(most)} can be read.` : '';
		if (!chosen || large) return;
		words.value = await chosen.text();
		source = chosen.name;
	});
	const opening = dialog('Open a text', 'The model reads it token by token; then the page shows what each of its heads looks at.',
		[['Text or code', words], ['or a file', file], ['Model', model, 'given with --model, in the package, or downloaded for transformers'], ['', fault]], 'Read', () => {
			fault.textContent = words.value ? '' : 'Type or paste a text, or choose a file.';
			if (!words.value) return false;
			return work({ what: 'read', text: words.value, model: model.value, source: source ?? 'typed text' }, 'Reading');
		});
	const number = (value, rest) => h('input', { type: 'number', min: 0, value, ...rest });
	const [many, heat] = [number(40, { min: 1, max: 512 }), number(0.8, { max: 5, step: 0.1 })];
	const more = dialog('Continue the text', 'The model goes on writing; each token and what it looks at appear as they come.',
		[['Tokens', many], ['Temperature', heat, '0 always takes the likeliest token; 1 draws as the model expects']], 'Write', () => {
			const params = { what: 'generate', count: many.valueAsNumber, temperature: heat.valueAsNumber };
			let busy = false; // what came meanwhile is shown with what comes next
			return work(params, 'Writing', async (run) => {
				if (busy) return;
				busy = true;
				await app.openRun(run, true).then(app.rest, app.fault);
				busy = false;
			});
		});
	const openButton = button('Open…', () => {
		fault.textContent = '';
		replace(model, app.info.models.map((name) => h('option', name)));
		model.value = app.info.model;
		opening.showModal();
		words.focus();
	}, { class: 'main' });
	const moreButton = button('Continue…', () => more.showModal());
	const parts = h('span.joined');
	const rows = choice('Row', [], 0, (batch) => app.store.set({ batch: Number(batch) }), 'One of the texts that were read side by side');
	const runs = choice('Run', [], '', (run) => app.openRun(Number(run)).catch(app.fault));
	return {
		bar,
		work,
		dialogs: [opening, more],
		controls: [runs.element, rows.element, parts, openButton, moreButton],
		update(changed) {
			if (!changed.has('run')) return;
			const { info } = app;
			const length = info.stop - info.start;
			const part = (words_, start, off) => button(words_, () => work({ what: 'read', run: info.run, start: Math.max(0, start) }, 'Reading'), { disabled: off });
			openButton.hidden = !info.can.read;
			moreButton.hidden = !info.can.generate;
			runs.set(info.runs.map(({ run, source: text, model: by }) => [run, `${text || 'text'}, ${by}`.slice(0, 60)]), info.run);
			runs.element.hidden = info.runs.length < 2;
			rows.set(Array.from({ length: info.batch }, (_, i) => [i, i]), app.state.batch);
			rows.element.hidden = info.batch < 2;
			parts.hidden = !(info.can.read && length < info.total);
			replace(parts, part('Earlier part', info.start - length, info.start === 0), part('Later part', info.stop, info.stop >= info.total));
		},
	};
}
