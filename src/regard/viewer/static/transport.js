// What the page makes of answers that take a while. A transport has call(method, params, signal) -> {meta, data}: the page
// knows no other way to a number.

export function aborted(error) {
	return error?.name === 'AbortError';
}

// failed(error) is told what goes wrong, unless nobody waits for it any more.
export function asking(transport, failed) {
	return {
		// Work of which only the last is wanted: work(signal, ...) anew, and the signal of the one before is aborted. Where it
		// fails, clear() takes away what was shown: it answered another question.
		latest(work, clear) {
			let control = null;
			return async (...given) => {
				control?.abort();
				control = new AbortController();
				try {
					return await work(control.signal, ...given);
				} catch (error) {
					if (aborted(error)) return;
					clear?.();
					failed(error);
				}
			};
		},
		// Asks after a job until it ends: progress(meta) at every change. A job that failed is an error.
		async follow(job, progress, signal) {
			let seen;
			for (;;) {
				const asked = performance.now();
				const { meta, data } = await transport.call('job', { job, seen }, signal);
				progress?.(meta);
				if (meta.state === 'failed') throw new Error(meta.error);
				if (meta.state !== 'running') return { meta, data };
				if (seen === meta.tick && performance.now() - asked < 200) await new Promise((done) => setTimeout(done, 200));
				seen = meta.tick;
			}
		},
		stop: (job) => transport.call('stop', { job }).catch(failed),
	};
}
