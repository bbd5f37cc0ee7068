// Asks the server: call(method, params, signal) -> {meta, data}. The page knows no other way to a number.

export class HttpTransport {
	async call(method, params, signal) {
		const request = { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(params), signal };
		const answer = await fetch(`api/${method}`, request).catch((error) => {
			throw aborted(error) ? error : new Error('The server does not answer any more: is regard still running?');
		});
		if (!answer.ok) {
			const said = await answer.json().catch(() => ({}));
			throw new Error(said.error ?? `The server answered ${answer.status} ${answer.statusText}`);
		}
		// the length of the JSON, the JSON, the numbers
		const buffer = await answer.arrayBuffer();
		const length = new DataView(buffer).getUint32(0, true);
		return { meta: JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length))), data: buffer.slice(4 + length) };
	}
}

export function aborted(error) {
	return error?.name === 'AbortError';
}

// Work of which only the last is wanted: work(signal, ...) anew, and the signal of the one before is aborted.
export function latest(work, failed) {
	let control = null;
	return async (...given) => {
		control?.abort();
		control = new AbortController();
		try {
			return await work(control.signal, ...given);
		} catch (error) {
			if (!aborted(error)) failed(error);
			return undefined;
		}
	};
}

// Asks after a job until it ends: progress(meta) at every change. A job that failed is an error.
export async function follow(transport, job, progress, signal) {
	let seen;
	for (;;) {
		const asked = performance.now();
		const { meta, data } = await transport.call('job', { job, seen }, signal);
		progress?.(meta);
		if (meta.state === 'failed') throw new Error(meta.error ?? `The job ${meta.what} failed`);
		if (meta.state !== 'running') return { meta, data };
		if (seen === meta.tick && performance.now() - asked < 200) await new Promise((done) => setTimeout(done, 200));
		seen = meta.tick;
	}
}
