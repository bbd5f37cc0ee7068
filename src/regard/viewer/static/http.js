// Asks the server that the page came from.

import { aborted } from './transport.js';

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
