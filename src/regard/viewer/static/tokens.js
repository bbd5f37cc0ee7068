// The tokens along one axis, fetched in pieces when they are first needed.

const PIECE = 2048;

export class Tokens {
	// fetch(start, stop) -> {labels, texts, ids}; arrived() is called whenever there are more.
	constructor(length, fetch, arrived) {
		Object.assign(this, { length, fetch, arrived, pieces: new Map() });
	}

	load(piece) {
		if (!this.pieces.has(piece)) {
			const start = piece * PIECE;
			const loading = this.fetch(start, Math.min(this.length, start + PIECE)).then((found) => {
				Object.assign(entry, found);
				this.arrived();
			});
			const entry = { loading };
			this.pieces.set(piece, entry);
			loading.catch(() => this.pieces.delete(piece));
		}
		return this.pieces.get(piece).loading;
	}

	// What is known of a token now; asks for it if that is nothing.
	label(index) {
		const piece = Math.floor(index / PIECE);
		if (!this.pieces.has(piece)) this.load(piece).catch(() => {});
		return this.pieces.get(piece).labels?.[index % PIECE];
	}

	text(index) {
		return this.pieces.get(Math.floor(index / PIECE))?.texts?.[index % PIECE];
	}

	async range(start, stop) {
		const pieces = [];
		for (let piece = Math.floor(start / PIECE); piece * PIECE < stop; piece++) pieces.push(this.load(piece));
		await Promise.all(pieces);
	}

	labelled(...indices) {
		return Promise.all(indices.map(async (index) => {
			await this.load(Math.floor(index / PIECE));
			return this.label(index);
		}));
	}
}
