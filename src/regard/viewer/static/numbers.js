// Weights as codes and as words. A weight travels as a 16-bit code of its logarithm:
//   code = 0                                      the weight is exactly 0 (the mask hides the key)
//   code = clamp(round(65535 + 2048 log2 w), 1, 65535)    otherwise: 2^-32 to 1 in steps of 2^(1/2048)

export const CODES = 65536;
export const PER_OCTAVE = 2048;

export function weightOf(code) {
	return code === 0 ? 0 : 2 ** ((code - 65535) / PER_OCTAVE);
}

// A number with `digits` significant digits; very small and very large ones as powers of ten.
export function number(value, digits = 3) {
	if (Number.isNaN(value ?? NaN)) return '–';
	if (Math.abs(value) === Infinity) return value > 0 ? '∞' : '−∞';
	if (value === 0) return '0';
	const size = Math.abs(value);
	if (size < 1e-3 || size >= 1e6) {
		const [mantissa, power] = size.toExponential(digits - 1).split('e');
		const raised = [...String(Number(power))].map((sign) => '⁰¹²³⁴⁵⁶⁷⁸⁹'[sign] ?? '⁻').join('');
		return `${value < 0 ? '−' : ''}${mantissa}·10${raised}`;
	}
	const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
	return (value < 0 ? '−' : '') + size.toFixed(Math.min(places, 6));
}

export function percent(share) {
	const value = 100 * share;
	if (value > 0 && value < 0.1) return '< 0.1 %';
	return `${value.toFixed(value < 99.95 ? 1 : 0)} %`;
}

export function count(value) {
	return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, ',');
}

export function plural(value, one, more = `${one}s`) {
	return `${count(value)} ${value === 1 ? one : more}`;
}

// The places of the largest values, the largest first.
export function largest(values, many, skip) {
	const found = [];
	for (let i = skip; i < values.length; i++) {
		const value = values[i];
		if (!(value > 0) || (found.length === many && value <= values[found[many - 1]])) continue;
		let at = found.length;
		while (at > 0 && values[found[at - 1]] < value) at--;
		found.splice(at, 0, i);
		found.length = Math.min(found.length, many);
	}
	return found;
}
