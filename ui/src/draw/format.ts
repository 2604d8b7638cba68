import { t } from '../texts.ts';

const UNITS: [number, string][] = [
  [1e9, 's'],
  [1e6, 'ms'],
  [1e3, 'µs'],
  [1, 'ns'],
];

/** A length of time with three digits: `24.1 ms`. */
export function duration(ns: number): string {
  if (!Number.isFinite(ns)) return '–';
  const size = Math.abs(ns);
  if (size >= 600e9) return `${Math.floor(ns / 60e9)} min ${Math.round((ns / 1e9) % 60)} s`;
  const [unit, name] = UNITS.find(([u]) => size >= u) ?? UNITS[3];
  return `${digits(ns / unit)} ${name}`;
}

const BYTES = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

export function bytes(count: number): string {
  if (!Number.isFinite(count)) return '–';
  let i = 0;
  while (Math.abs(count) >= 1024 && i < BYTES.length - 1) {
    count /= 1024;
    i++;
  }
  return `${i ? digits(count) : Math.round(count)} ${BYTES[i]}`;
}

const RATES: [number, string][] = [
  [1e12, 'TB/s'],
  [1e9, 'GB/s'],
  [1e6, 'MB/s'],
  [1e3, 'kB/s'],
];

/** Bytes per second with three digits, in powers of ten as links and memories have them: `600 B/s`, `1.20 GB/s`. */
export function rate(bytesPerSecond: number): string {
  if (!Number.isFinite(bytesPerSecond)) return '–';
  const found = RATES.find(([size]) => Math.abs(bytesPerSecond) >= size * 0.9995);
  return found ? `${digits(bytesPerSecond / found[0])} ${found[1]}` : `${Math.round(bytesPerSecond)} B/s`;
}

export function digits(value: number): string {
  const size = Math.abs(value);
  if (!size) return '0';
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : size >= 0.01 ? value.toFixed(2) : value.toPrecision(1);
}

const LONG = 28;

/** The same names without what all of them begin with, up to a dot or slash, if any is long: what they differ in is in sight. */
export function apart(names: readonly string[]): string[] {
  const [first = ''] = names;
  if (names.every(name => name.length <= LONG || name === first)) return [...names];
  let same = 0;
  while (same < first.length && names.every(name => name[same] === first[same])) same++;
  const cut = Math.max(first.lastIndexOf('.', same - 1), first.lastIndexOf('/', same - 1)) + 1;
  return names.map(name => (cut > 3 ? `…${name.slice(cut)}` : name));
}

/** A share, 0 to 1: `48 %`. */
export function percent(share: number): string {
  return `${Math.round(share * 100)} %`;
}

const grouped = new Intl.NumberFormat('en-US'); // making one takes a hundred times as long as using it

export function count(n: number): string {
  return grouped.format(n).replaceAll(',', '\u2009');
}

export function ranks(list: readonly number[]): string {
  const parts: string[] = [];
  for (let i = 0; i < list.length; ) {
    let j = i;
    while (j + 1 < list.length && list[j + 1] === list[j] + 1) j++;
    parts.push(j > i + 1 ? `${list[i]}–${list[j]}` : j > i ? `${list[i]}, ${list[j]}` : `${list[i]}`);
    i = j + 1;
  }
  return list.length === 1 ? t('rank %1', parts[0]) : t('ranks %1', parts.join(', '));
}

/** Places of the marks on a time axis, some `apart` pixels from each other, and their texts. */
export function ticks(from: number, to: number, width: number, apart = 110): { at: number; text: string }[] {
  const wanted = ((to - from) / width) * apart;
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= wanted) ?? wanted;
  const decimals = Math.max(0, Math.min(9, 9 - Math.floor(Math.log10(step) + 1e-9)));
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push({ at, text: `${(at / 1e9).toFixed(decimals)} s` });
  return found;
}

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

/** About `most` round values between two, and at least two, for the lines behind a chart: one line alone gives no scale. */
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
