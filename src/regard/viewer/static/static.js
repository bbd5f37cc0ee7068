// The transport of a saved page: answers from the data in the file, without any server.

import { threeTokens } from './byhand.js';
import { Blobs, Codes, Head, pacer } from './offline.js';

const FORMAT = 'regard.page.1';

function numbers(values) {
	return values.buffer;
}

export class StaticTransport {
	constructor(file) {
		if (file.format !== FORMAT) throw new Error(`expected a page of the format ${FORMAT}, got ${file.format}`);
		this.file = file;
		this.info = file.answers.info;
		this.blobs = new Blobs(file.blobs);
		this.opened = new Map();
	}

	async call(method, params, signal) {
		const answer = this[`answer_${method}`];
		if (!answer) throw new Error('This page is a saved one: there is no model in it to ask');
		const { meta, data } = await answer.call(this, params, signal);
		return { meta, data: data ?? new ArrayBuffer(0) };
	}

	kept(layer, head) {
		const found = this.file.heads.find((one) => one.layer === layer && one.head === head);
		if (!found) throw new Error(`This page does not hold head ${head} of layer ${layer}`);
		return found;
	}

	// The head, ready to compute; null where only finished tiles are kept.
	async head({ layer, head }) {
		const kept = this.kept(layer, head);
		if (!kept.q) return null;
		const name = `${layer}.${head}`;
		if (!this.opened.has(name)) this.opened.set(name, Head.open(this.blobs, kept, this.file.spans[kept.spans]));
		return this.opened.get(name);
	}

	async computed(place) {
		const head = await this.head(place);
		if (!head) throw new Error('Of this head the file holds only the map, in finished cells: no single weight can be read');
		return head;
	}

	axis(of, layer) {
		return this.file.answers.tokens.find((one) => one.of === of && one.layers.includes(layer));
	}

	answer_info() {
		return { meta: this.info };
	}

	answer_heads() {
		return { meta: this.file.answers.heads };
	}

	answer_tokens({ of, layer = 0, start, stop }) {
		const { labels, texts, ids } = this.axis(of, layer);
		const cut = (list) => list?.slice(start, stop);
		return { meta: { start, stop, total: labels.length, labels: cut(labels), texts: cut(texts), ids: cut(ids) } };
	}

	answer_search({ of, layer = 0, text, limit = 200 }) {
		const { texts, labels } = this.axis(of, layer);
		const pieces = texts ?? labels;
		const starts = [];
		let whole = '';
		for (const piece of pieces) {
			starts.push(whole.length);
			whole += piece.toLowerCase();
		}
		const wanted = text.toLowerCase();
		const matches = [];
		let total = 0;
		let token = 0;
		const before = (place) => {
			while (token + 1 < starts.length && starts[token + 1] <= place) token++;
			return token;
		};
		for (let at = whole.indexOf(wanted); wanted && at >= 0; at = whole.indexOf(wanted, at + wanted.length)) {
			const first = before(at);
			total++;
			if (matches.length < limit) matches.push([first, before(at + wanted.length - 1)]);
		}
		return { meta: { matches, total } };
	}

	async answer_picture() {
		return { meta: this.info.picture, data: await this.blobs.bytes(this.file.picture) };
	}

	async answer_thumbs({ layer }) {
		const heads = this.file.heads.filter((one) => one.layer === layer);
		const { rows = 0, columns = 0 } = heads[0]?.thumb ?? {};
		const codes = new Uint16Array(heads.length * rows * columns);
		for (const [i, { thumb }] of heads.entries()) {
			const bytes = new Uint8Array(await this.blobs.bytes(thumb.codes));
			bytes.forEach((byte, at) => (codes[i * bytes.length + at] = byte && (byte << 8) | 128));
		}
		return { meta: { heads: heads.map((one) => one.head), rows, columns, exact: true, sampled: null }, data: numbers(codes) };
	}

	async answer_tile({ layer, head, ...tile }, signal) {
		const { codes } = this.kept(layer, head);
		const computed = await this.head({ layer, head });
		const ready = codes && (!computed || tile.level >= codes.level);
		const source = ready ? await Codes.open(this.blobs, codes) : computed;
		return { meta: { exact: true, sampled: null, job: null }, data: numbers(await source.tile(tile, signal)) };
	}

	async answer_series({ layer, head }) {
		const kept = this.kept(layer, head);
		const { query_len: queries, key_len: keys } = this.info.layers[layer];
		const meta = { names: ['entropy', 'visible', 'received', 'viewers'], query_len: queries, key_len: keys, ready: true, job: null };
		const [entropy, received] = await Promise.all([this.blobs.floats(kept.entropy), this.blobs.floats(kept.received)]);
		const values = new Float32Array(2 * queries + 2 * keys);
		if (kept.visible !== undefined) {
			values.set(await this.blobs.floats(kept.visible), queries);
			values.set(await this.blobs.floats(kept.viewers), 2 * queries + keys);
		} else await this.count(this.file.spans[kept.spans], values, queries, keys);
		values.set(entropy, 0);
		values.set(received, 2 * queries);
		return { meta, data: numbers(values) };
	}

	// How many keys each query may see, and how many queries each key.
	async count(span, values, queries, keys) {
		const [starts, firsts, stops] = await Promise.all(['start', 'first', 'stop'].map((name) => this.blobs.integers(span[name])));
		const change = new Int32Array(keys + 1);
		for (let query = 0; query < queries; query++) {
			for (let n = starts[query]; n < starts[query + 1]; n++) {
				values[queries + query] += stops[n] - firsts[n];
				change[firsts[n]]++;
				change[stops[n]]--;
			}
		}
		for (let key = 0, seen = 0; key < keys; key++) values[2 * queries + keys + key] = seen += change[key];
	}

	async answer_cell(params, signal) {
		const { layer, query, key, queries, keys } = params;
		const head = await this.computed(params);
		if (queries) {
			const best = { max: 0, mass: 0, query: queries[0], key: keys[0], hidden: true };
			const pace = pacer(signal);
			for (let i = queries[0]; i < queries[1]; i++) {
				head.eachWeight(i, ...keys, (j, weight) => {
					if (best.hidden || weight > best.max) Object.assign(best, { max: weight, query: i, key: j, hidden: false });
					best.mass += weight / (queries[1] - queries[0]);
				});
				await pace();
			}
			return { meta: best };
		}
		const hidden = head.hidden(query, key);
		const score = hidden ? null : head.score(query, key);
		const weight = hidden ? 0 : Math.exp(score - head.lse[query]);
		const visible = head.visible(query);
		const labels = { query_label: this.axis('query', layer).labels[query], key_label: this.axis('key', layer).labels[key] };
		const distance = query + (this.info.layers[layer].behind ?? 0) - key;
		return { meta: { weight, log2: weight ? Math.log2(weight) : null, score, lse: head.lse[query], hidden, visible, uniform: visible ? 1 / visible : 0, ...labels, distance } };
	}

	async answer_row({ heads, query }) {
		const wanted = heads ?? this.file.heads.map((one) => [one.layer, one.head]);
		const keys = this.info.layers[wanted[0][0]].key_len;
		const values = new Float32Array(wanted.length * keys);
		const sink = [];
		for (const [i, [layer, head]] of wanted.entries()) {
			const found = await this.computed({ layer, head });
			let sum = 0;
			found.eachWeight(query, 0, keys, (key, weight) => {
				values[i * keys + key] = weight;
				sum += weight;
			});
			sink.push(this.info.layers[layer].sink ? Math.max(0, 1 - sum) : 0);
		}
		return { meta: { heads: wanted, key_len: keys, sink }, data: numbers(values) };
	}

	async answer_column({ heads, key }, signal) {
		const wanted = heads ?? this.file.heads.map((one) => [one.layer, one.head]);
		const queries = this.info.layers[wanted[0][0]].query_len;
		const values = new Float32Array(wanted.length * queries);
		const pace = pacer(signal);
		for (const [i, [layer, head]] of wanted.entries()) {
			const found = await this.computed({ layer, head });
			for (let query = 0; query < queries; query++) {
				if (!found.hidden(query, key)) values[i * queries + query] = Math.exp(found.score(query, key) - found.lse[query]);
				if (query % 256 === 0) await pace();
			}
		}
		return { meta: { heads: wanted, query_len: queries }, data: numbers(values) };
	}

	async answer_sel({ heads, queries, keys }, signal) {
		const [rows, columns] = [queries[1] - queries[0], keys[1] - keys[0]];
		const values = new Float32Array(heads.length * rows * columns);
		const pace = pacer(signal);
		for (const [i, [layer, head]] of heads.entries()) {
			const found = await this.computed({ layer, head });
			for (let row = 0; row < rows; row++) {
				const at = (i * rows + row) * columns;
				found.eachWeight(queries[0] + row, ...keys, (key, weight) => (values[at + key - keys[0]] = weight));
				await pace();
			}
		}
		return { meta: { heads, rows, columns }, data: numbers(values) };
	}

	async answer_compare({ a, b }, signal) {
		const [one, other] = await Promise.all([a, b].map(([layer, head]) => this.computed({ layer, head })));
		const { query_len: queries, key_len: keys } = this.info.layers[a[0]];
		const values = new Float32Array(3 * queries);
		const [p, r] = [new Float64Array(keys), new Float64Array(keys)];
		const pace = pacer(signal);
		const part = (x, mean) => (x > 0 ? 0.5 * x * Math.log(x / mean) : 0);
		for (let query = 0; query < queries; query++) {
			p.fill(0);
			r.fill(0);
			one.eachWeight(query, 0, keys, (key, weight) => (p[key] = weight));
			other.eachWeight(query, 0, keys, (key, weight) => (r[key] = weight));
			let [divergence, variation, dot, pp, rr] = [0, 0, 0, 0, 0];
			for (let key = 0; key < keys; key++) {
				const [x, y] = [p[key], r[key]];
				const mean = (x + y) / 2;
				divergence += part(x, mean) + part(y, mean);
				variation += Math.abs(x - y) / 2;
				dot += x * y;
				pp += x * x;
				rr += y * y;
			}
			values[query] = divergence;
			values[queries + query] = variation;
			values[2 * queries + query] = pp && rr ? dot / Math.sqrt(pp * rr) : 0;
			await pace();
		}
		const means = [0, 1, 2].map((n) => values.subarray(n * queries, (n + 1) * queries).reduce((sum, value) => sum + value, 0) / queries);
		return { meta: { names: ['divergence', 'variation', 'cosine'], means, query_len: queries, ready: true, job: null }, data: numbers(values) };
	}

	async answer_steps({ layer, head, query, count = 16, keys: extra = [] }) {
		const found = await this.computed({ layer, head });
		const { key_len: length } = this.info.layers[layer];
		const weights = new Float64Array(length);
		found.eachWeight(query, 0, length, (key, weight) => (weights[key] = weight));
		const order = [...weights.keys()].filter((key) => !found.hidden(query, key)).sort((i, j) => weights[j] - weights[i]);
		const largest = order.length ? Math.max(...order.slice(0, 1).map((key) => found.score(query, key))) : -Infinity;
		const keys = [...new Set([...order.slice(0, count), ...extra])].sort((i, j) => weights[j] - weights[i]);
		const labels = this.axis('key', layer).labels;
		const row = (matrix, index) => [...matrix.values.subarray(index * matrix.columns, (index + 1) * matrix.columns)];
		const steps = this.file.answers.steps[layer].filter(({ name }) => found.v || (name !== 'value' && name !== 'weigh'));
		const has = (name) => steps.some((step) => step.name === name);
		const table = {};
		const scaled = (key) => found.scale * found.product(query, key);
		const capped = (key) => (found.softcap ? found.softcap * Math.tanh(scaled(key) / found.softcap) : scaled(key));
		const scores = { score: (key) => found.product(query, key), scale: scaled, cap: capped, bias: (key) => found.score(query, key), mask: (key) => (found.hidden(query, key) ? null : found.score(query, key)) };
		for (const [name, of] of Object.entries(scores)) if (has(name)) table[name] = keys.map(of);
		table.exp = keys.map((key) => (found.hidden(query, key) ? 0 : Math.exp(found.score(query, key) - largest)));
		table.softmax = keys.map((key) => weights[key]);
		const held = table.softmax.reduce((sum, weight) => sum + weight, 0);
		const whole = weights.reduce((sum, weight) => sum + weight, 0);
		const mixed = (chosen) => {
			const sum = new Array(found.v.columns).fill(0);
			return chosen.map((key) => {
				const value = row(found.v, key);
				value.forEach((one, i) => (sum[i] += weights[key] * one));
				return [...sum];
			});
		};
		const partial = found.v ? mixed(keys) : null;
		return {
			meta: {
				query, label: this.axis('query', layer).labels[query], shape: { head_dim: found.q.columns, value_dim: found.v?.columns ?? null, visible: order.length },
				steps, keys: keys.map((key) => ({ key, label: labels[key], hidden: found.hidden(query, key) })), table, q: row(found.q, query), k: keys.map((key) => row(found.k, key)),
				v: found.v ? keys.map((key) => row(found.v, key)) : null, partial, largest, lse: found.lse[query], sink: this.info.layers[layer].sink ? 1 - whole : 0, held, rest: whole - held,
				output: found.v ? (mixed(order).at(-1) ?? new Array(found.v.columns).fill(0)) : null, own: null, difference: null, own_is: '',
			},
		};
	}

	answer_example(params) {
		return { meta: threeTokens(this.file.answers.example, params) };
	}
}
