import { t } from '../view/texts.ts';

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
