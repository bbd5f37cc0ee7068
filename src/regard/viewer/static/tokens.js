// The tokens along one axis, fetched in pieces when they are first needed.

const PIECE = 2048;

export class Tokens {
	// fetch(start, stop) -> {labels, texts, ids}; arrived() is called whenever there are more.
	constructor(length, fetch, arrived) {
		Object.assign(this, { length, fetch, arrived, pieces: new Map() });
	}

	load(piece) {
		const known = this.pieces.get(piece);
		if (known) return known.loading;
		const start = piece * PIECE;
		const entry = { labels: null, texts: null };
		this.pieces.set(piece, entry);
		entry.loading = this.fetch(start, Math.min(this.length, start + PIECE)).then(
			({ labels, texts }) => {
				Object.assign(entry, { labels, texts });
				this.arrived();
			},
			(error) => {
				this.pieces.delete(piece);
				throw error;
			},
		);
		return entry.loading;
	}

	// What is known of a token now; asks for it if that is nothing.
	label(index) {
		const entry = this.pieces.get(Math.floor(index / PIECE));
		if (entry?.labels) return entry.labels[index % PIECE];
		if (!entry) this.load(Math.floor(index / PIECE)).catch(() => {});
		return undefined;
	}

	text(index) {
		return this.pieces.get(Math.floor(index / PIECE))?.texts?.[index % PIECE];
	}

	async range(start, stop) {
		const pieces = [];
		for (let piece = Math.floor(start / PIECE); piece * PIECE < stop; piece++) pieces.push(this.load(piece));
		await Promise.all(pieces);
	}

	async labelled(index) {
		await this.load(Math.floor(index / PIECE));
		return this.label(index);
	}
}
