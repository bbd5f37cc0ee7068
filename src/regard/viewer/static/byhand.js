// The small example worked out here, where no server is: the same steps as in Python, for other numbers.

function times(one, other) {
	return one.map((row) => other[0].map((_, c) => row.reduce((sum, value, i) => sum + value * other[i][c], 0)));
}

// The example `known` with the numbers of `changed`: x [tokens][features], query, key, value [features][size].
export function threeTokens(known, changed = {}) {
	const given = {};
	for (const name of ['x', 'query', 'key', 'value', 'causal', 'scale']) given[name] = changed[name] ?? known[name];
	const [q, k, v] = ['query', 'key', 'value'].map((name) => times(given.x, given[name]));
	const score = times(q, k[0].map((_, c) => k.map((row) => row[c])));
	const scaled = score.map((row) => row.map((value) => value * given.scale));
	const masked = scaled.map((row, i) => row.map((value, j) => (given.causal && j > i ? null : value)));
	const weights = masked.map((row) => {
		const largest = Math.max(...row.filter((value) => value !== null));
		const powers = row.map((value) => (value === null ? 0 : Math.exp(value - largest)));
		const sum = powers.reduce((all, value) => all + value, 0);
		return powers.map((value) => value / sum);
	});
	const output = times(weights, v);
	const made = {
		'project query': q, 'project key': k, 'project value': v, 'split query': q, 'split key': k, 'split value': v,
		query: q, key: k, value: v, score, scale: scaled, mask: masked, softmax: weights, weigh: output, join: output,
	};
	const steps = known.steps.filter(({ name }) => name in made && (name !== 'mask' || given.causal));
	return { ...known, ...given, steps: steps.map((step) => ({ ...step, numbers: made[step.name] })) };
}
