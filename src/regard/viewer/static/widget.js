// The page in a notebook: the same panels, over the notebook's own messages.

import { startPage } from './app.js';

class WidgetTransport {
	constructor(model) {
		Object.assign(this, { model, open: new Map(), last: 0 });
		this.hear = (message, buffers) => this.receive(message, buffers);
		model.on('msg:custom', this.hear);
	}

	receive({ id, meta, error }, buffers) {
		const waiting = this.open.get(id);
		if (!waiting) return;
		this.open.delete(id);
		if (error !== undefined) return void waiting.failed(new Error(error));
		const view = buffers?.[0];
		const data = view ? new Uint8Array(view.buffer ?? view, view.byteOffset, view.byteLength).slice().buffer : new ArrayBuffer(0);
		waiting.done({ meta, data });
	}

	async call(method, params, signal) {
		signal?.throwIfAborted();
		const id = ++this.last;
		return new Promise((done, failed) => {
			this.open.set(id, { done, failed });
			signal?.addEventListener('abort', () => {
				if (this.open.delete(id)) this.model.send({ cancel: id });
				failed(signal.reason);
			}, { once: true });
			this.model.send({ id, method, params });
		});
	}

	close() {
		this.model.off('msg:custom', this.hear);
		for (const { failed } of this.open.values()) failed(new DOMException('closed', 'AbortError'));
		this.open.clear();
	}
}

export function render({ model, el }) {
	const root = document.createElement('div');
	el.append(root);
	const transport = new WidgetTransport(model);
	const started = startPage(root, transport, { linked: false });
	return () => {
		transport.close();
		started.then((page) => page.end());
		root.remove();
	};
}
