import { bytes, count, digits, duration, rate } from './format.ts';

/** A measured value with its unit, three digits: `24.1 ms`, `1.20 GB/s`, `37 %`. */
export function quantity(value: number, unit: string): string {
  if (Number.isNaN(value)) return 'NaN';
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  switch (unit) {
    case 's':
      return duration(value * 1e9);
    case 'B':
      return bytes(value);
    case 'B/s':
      return rate(value);
    case '%':
      return `${digits(value)} %`;
    case '1':
      return `${Math.round(value * 100)} %`;
    case '1/s':
      return `${number(value)}/s`;
    default:
      return number(value);
  }
}

/** A number with four digits, in powers of ten where it is very large or very small. */
export function number(value: number): string {
  const size = Math.abs(value);
  if (size && (size >= 1e7 || size < 1e-3)) return scientific(value);
  if (Number.isInteger(value)) return count(value);
  if (size >= 1000) return count(Math.round(value));
  return String(Number(value.toPrecision(4)));
}

/** As people write it: `1.71·10⁻⁶`. */
function scientific(value: number): string {
  const [digits, power] = value.toExponential(2).split('e');
  return `${digits}·10${[...power.replace('+', '')].map(sign => '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'['-0123456789'.indexOf(sign)]).join('')}`;
}

const ROUND = [1, 2, 5, 10, 20, 50];

/** Powers of ten between two positive values, or at least two round values if there are none or only one. */
export function logLevels(low: number, high: number): number[] {
  const found = [];
  for (const digits of [[1], [1, 3], [1, 2, 5]]) {
    found.length = 0;
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) for (const digit of digits) found.push(Number((digit * 10 ** power).toPrecision(6)));
    const inside = found.filter(value => value >= low && value <= high);
    if (inside.length >= 2) return inside.filter((_, i) => i % Math.ceil(inside.length / 4) === 0);
  }
  // So short a stretch that it looks like that of an axis that is not logarithmic.
  return levels(low, high, '', 2.5);
}

/** About `most` round values between two, and at least two, for the lines behind a chart: one tells nothing of how high anything is. */
export function levels(low: number, high: number, unit: string, most: number): number[] {
  const wanted = (high - low) / most;
  if (!(wanted > 0) || !Number.isFinite(wanted)) return [];
  const some = multiples(low, high, unit, wanted);
  return some.length >= 2 ? some : multiples(low, high, unit, (high - low) / 5);
}

/** Texts of levels: where three digits are not enough to tell them apart, how much each is more than the least. */
export function levelTexts(found: readonly number[], unit: string): string[] {
  const texts = found.map(level => quantity(level, unit));
  if (new Set(texts).size === texts.length) return texts;
  return found.map((level, i) => (i ? `+${quantity(level - found[0], unit)}` : texts[0]));
}

/** The multiples of a round step of at least this length. */
function multiples(low: number, high: number, unit: string, wanted: number): number[] {
  const base = unit === 'B' ? 1024 ** Math.floor(Math.log(Math.max(1, high)) / Math.log(1024)) : 1;
  const power = 10 ** Math.floor(Math.log10(wanted / base)) * base;
  const step = ROUND.map(f => f * power).find(s => s >= wanted * 0.999) ?? wanted;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12) && found.length < 20; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}
