import assert from 'node:assert/strict';
import { test } from 'node:test';
import { rate, levels, levelTexts, logLevels, number, quantity } from '../src/draw/format.ts';
import { bandOf, Borders, chartsOf, gapOf, gridOf, partsOf, select, stackOf, isolated, newestEvent, widened, type Gaps, type Grid } from '../src/model/charts.ts';
import { POINT_BYTES, readPoints, Series, SeriesStore } from '../src/model/series.ts';
import { Store, type RankRow, type Mark } from '../src/model/store.ts';

const SECOND = 1e9;

function series(rank: number, ...points: [time: number, value: number][]): Series {
  const one = new Series({ rank, name: 'x', unit: '' });
  for (const [time, value] of points) one.put(time, value, NaN);
  return one;
}

/** Gaps of lines that are interrupted by these times, or by nothing but a distance. */
function within(longest: number, ...borders: number[]): Gaps {
  return { longest, borders: () => Float64Array.from(borders) };
}

/** What a line of a grid shows: times and values, `null` where it is broken. */
function line(grid: Grid, k: number): (number | null)[][] {
  return grid.x.map((x, i) => [x, grid.lines[k][i]]).filter(([, value]) => value !== undefined) as (number | null)[][];
}

/** Numbers that look random and are the same each time. */
function random(seed: number): () => number {
  return () => (seed = (Math.imul(seed, 1103515245) + 12345) >>> 0) / 2 ** 32;
}

test('few points are shown as they are, at most half a pixel off, with those beside the view', () => {
  const one = series(0, [-50, 1], [-10, 2], [12, 3], [55, 4], [140, 5], [160, 6]);
  const grid = gridOf([one], 0, 100, 50, within(Infinity));
  const found = line(grid, 0);
  assert.deepEqual(found.map(([, value]) => value), [2, 3, 4, 5]);
  assert.deepEqual([found[0][0], found[3][0]], [-10, 140]);
  for (const [x, time] of [[found[1][0]!, 12], [found[2][0]!, 55]]) assert.ok(Math.abs(x - time) <= 1, `${x} for ${time}`);
  assert.deepEqual([grid.low, grid.high, grid.points], [3, 4, 2]);
});

test('of many points in a pixel the least and the greatest are shown, and no value that was not measured', () => {
  const next = random(3);
  const values = Array.from({ length: 20_000 }, (_, i) => [i, next()] as [number, number]);
  const grid = gridOf([series(0, ...values)], 0, 20_000, 100, within(Infinity));
  const measured = new Set(values.map(([, value]) => value));
  const found = line(grid, 0);
  assert.ok(found.length <= 204);
  for (const [, value] of found) assert.ok(measured.has(value!));
  for (let pixel = 0; pixel < 100; pixel++) {
    const inside = values.slice(pixel * 200, (pixel + 1) * 200).map(([, value]) => value);
    const shown = found.filter(([x]) => x! >= pixel * 200 && x! < (pixel + 1) * 200).map(([, value]) => value!);
    assert.deepEqual([Math.min(...shown), Math.max(...shown)], [Math.min(...inside), Math.max(...inside)]);
  }
});

test('a view that moves by a pixel shows the same pixels', () => {
  const next = random(9);
  const one = series(0, ...Array.from({ length: 5000 }, (_, i) => [i * 7, next()] as [number, number]));
  const [a, b] = [gridOf([one], 7000, 17_000, 100, within(Infinity)), gridOf([one], 7100, 17_100, 100, within(Infinity))];
  const known = new Map(line(a, 0).map(([x, value]) => [x, value]));
  const both = line(b, 0).filter(([x]) => x! >= 7200 && x! <= 16_900);
  assert.ok(both.length > 150);
  for (const [x, value] of both) assert.equal(known.get(x!), value);
});

test('nothing is drawn between points that are far apart, nor where a value is no number', () => {
  const grid = gridOf([series(0, [0, 1], [10, 2], [50, 3], [60, NaN], [70, 4], [80, Infinity], [90, 5])], 0, 100, 100, within(20));
  assert.deepEqual(line(grid, 0).map(([, value]) => value), [1, 2, null, 3, null, 4, null, 5]);
  assert.deepEqual(grid.broken, [60, 80]);
  assert.deepEqual([grid.low, grid.high], [1, 5]);
});

test('no line goes on from one cell to the next, nor from a death to the next process', () => {
  const one = series(0, [10, 1], [20, 2], [30, 3], [40, 4], [90, 5], [95, 6]);
  const values = (...view: [number, number, number]) => line(gridOf([one], ...view, within(Infinity, 25, 30, 50, 60)), 0).map(([, value]) => value);
  assert.deepEqual(values(0, 100, 100), [1, 2, null, 3, 4, null, 5, 6]);
  assert.deepEqual(values(22, 100, 100), [3, 4, null, 5, 6], 'the point left of the view is of another cell');
  assert.deepEqual(values(32, 70, 100), [3, 4, null], 'and so is the one right of it');
  const band = bandOf([one, series(1, [10, 1], [20, 2])], 0, 100, 100, within(Infinity, 25, 60));
  const shown = (time: number) => band.lines[1][band.x.findLastIndex(x => x <= time + 0.5)];
  assert.deepEqual([shown(22), shown(27), shown(32), shown(61), shown(91)], [2, null, 3, null, 5]);
});

test('a gap reaches from one value to the next, also where other lines have points', () => {
  assert.deepEqual(widened([1, undefined, null, undefined, 2, undefined, 3, null, undefined]), [1, null, null, null, 2, undefined, 3, null, null]);
  const grid = gridOf([series(0, [10, 1], [90, 2]), series(1, [50, 3])], 0, 100, 100, within(Infinity, 30));
  assert.deepEqual(grid.lines[0].filter(value => value !== null), [1, 2]);
});

test('a point that no line leads to is found', () => {
  assert.deepEqual(isolated([1, null, undefined, 2, undefined, null, 3, undefined, 4, null, 5]), [1, undefined, undefined, 2, undefined, undefined, undefined, undefined, undefined, undefined, 5]);
});

/** A store with marks, and points of one rank: names with their times. */
function recorded(marks: Mark[], points: Record<string, number[]>): Store {
  const store = new Store();
  const names = Object.keys(points);
  store.series.define(0, names.map(name => ({ rank: 0, name, unit: '' })));
  const all = names.flatMap((name, series) => points[name].map(time => ({ series, time })));
  const columns = readPoints(new ArrayBuffer(POINT_BYTES * all.length), all.length);
  all.forEach(({ series, time }, i) => ([columns.time[i], columns.series[i], columns.number[i]] = [time, series, i]));
  store.series.append(columns, 0, all.length);
  marks.forEach((mark, i) => store.marks.set(i, mark));
  store.version++;
  return store;
}

test('borders are those of cells, and for what is sampled those of processes', () => {
  const mark = (kind: Mark['kind'], begin: number, end: number | null): Mark => ({ kind, rank: 0, begin, end, text: '', ok: true });
  const store = recorded([mark('cell', 10, 20), mark('cell', 40, null), mark('left', 30, 30), mark('joined', 35, 35), mark('abort', 29, 29)], {});
  const borders = new Borders();
  borders.update(store);
  assert.deepEqual([[...borders.of(0, false)], [...borders.of(0, true)], [...borders.of(1, true)]], [[10, 20, 30, 35, 40], [30, 35], []]);
  const { version } = borders;
  store.version++;
  borders.update(store);
  assert.equal(borders.version, version, 'nothing is drawn again for rows');
  store.marks.set(1, mark('cell', 40, 50));
  store.version++;
  borders.update(store);
  assert.ok(borders.version > version);
});

test('charts stand still when nothing happens, though processor and memory are measured', () => {
  const cell: Mark = { kind: 'cell', rank: 0, begin: 10, end: 20, text: '[3]', ok: true };
  const joined: Mark = { kind: 'joined', rank: 0, begin: 5, end: 5, text: '', ok: true };
  const sampled = { 'hvdlab/cpu': [5, 15, 80], 'hvdlab/gpu0/memory': [90] };
  assert.equal(newestEvent(recorded([joined, cell], { loss: [12, 18], ...sampled })), 20);
  assert.equal(newestEvent(recorded([cell], { loss: [12, 25], ...sampled })), 25);
  assert.equal(newestEvent(recorded([cell, { ...joined, begin: 60 }], sampled)), 60);
  assert.equal(newestEvent(recorded([joined], sampled)), 90, 'nothing has happened yet');
  const running = recorded([cell], sampled);
  running.ranks = [{ rank: 0, state: 'running' } as RankRow];
  assert.equal(newestEvent(running), 90);
});

test('lines of several ranks have their own times', () => {
  const grid = gridOf([series(0, [10, 1], [30, 2]), series(1, [20, 3], [30, 4])], 0, 40, 40, within(Infinity));
  assert.deepEqual(line(grid, 0).map(([, value]) => value), [1, 2]);
  assert.deepEqual(line(grid, 1).map(([, value]) => value), [3, 4]);
  assert.equal(grid.x.length, 3);
});

test('a band is the least, the middle and the greatest of what the ranks last said', () => {
  const ranks = [0, 1, 2, 3, 4].map(rank => series(rank, [10 + rank, rank], [50 + rank, 10 * rank]));
  const grid = bandOf(ranks, 0, 100, 100, within(Infinity));
  const at = (time: number) => {
    const i = grid.x.findLastIndex(x => x <= time + 0.5);
    return grid.lines.map(values => values[i]);
  };
  assert.deepEqual(at(14), [0, 2, 4]);
  assert.deepEqual(at(11), [0, 0.5, 1]);
  assert.deepEqual(at(50), [0, 2, 4]);
  assert.deepEqual(at(52), [0, 4, 20]);
  assert.deepEqual(at(54), [0, 20, 40]);
  const held = bandOf(ranks, 0, 100, 100, within(20));
  assert.ok(held.lines[1].includes(null), 'what was said long ago counts no more');
});

test('the value at a place is that of the sorted ones', () => {
  const next = random(5);
  for (let round = 0; round < 200; round++) {
    const n = 1 + Math.floor(next() * 40);
    const values = Float64Array.from({ length: n }, () => Math.floor(next() * 12));
    const sorted = values.slice().sort();
    const k = Math.floor(next() * n);
    assert.equal(select(values, n, k), sorted[k]);
  }
});

test('shares are steps of a second each, stacked, and empty where there was nothing', () => {
  const second = (k: number) => (k + 0.5) * SECOND;
  const groups = [[0.5, 0.25], [0.3, 0.25], [0.2, 0.5]].map(values => [0, 1].map(rank => series(rank, [second(0), values[0]], [second(5), values[1]])));
  const grid = stackOf(groups, 0, 10 * SECOND, 500);
  assert.deepEqual(grid.x.map(x => Math.round(x / 1e8) / 10), [0, 1, 1, 5, 6]);
  assert.deepEqual(grid.lines.map(values => values[2]), [null, null, null]);
  assert.ok(grid.lines[2].filter(value => value != null).every(value => Math.abs(value! - 1) < 1e-12));
  assert.deepEqual([grid.lines[0][0], grid.lines[1][1]], [0.5, 0.8]);
  assert.deepEqual(partsOf(grid).map(part => Number(part.toFixed(6))), [0.375, 0.275, 0.35]);
});

test('what users report comes first, shares are one chart, and some are only shown when asked for', () => {
  const store = new SeriesStore();
  const names = ['hvdlab/threads', 'hvdlab/cpu', 'hvdlab/share/wait', 'hvdlab/share/compute', 'val_loss', 'hvdlab/step_time', 'accuracy'];
  store.define(0, names.map(name => ({ rank: 0, name, unit: '' })));
  const charts = chartsOf(store);
  assert.deepEqual(charts.map(chart => chart.id), ['val_loss', 'accuracy', 'hvdlab/step_time', 'hvdlab/share/', 'hvdlab/cpu', 'hvdlab/threads']);
  assert.deepEqual(charts.filter(chart => !chart.shown).map(chart => chart.id), ['hvdlab/threads']);
  assert.deepEqual(charts[3].names, ['hvdlab/share/wait', 'hvdlab/share/compute']);
  const cpu = series(0, ...Array.from({ length: 20 }, (_, k) => [k * SECOND, 1] as [number, number]));
  assert.equal(gapOf(charts[4], [cpu]), 12 * SECOND);
  assert.equal(gapOf(charts[0], [cpu]), Infinity);
});

test('an axis has at least two levels, which can be told apart', () => {
  const next = random(11);
  for (let round = 0; round < 2000; round++) {
    const unit = ['', 'B', 's', 'B/s'][round % 4];
    const low = 10 ** (12 * next() - 6) * (unit.startsWith('B') ? 1e9 : 1);
    const high = low * (1 + 10 ** (4 * next() - 3));
    const found = levels(low, high, unit, round % 8 < 4 ? 2.5 : 4);
    assert.ok(found.length >= 2 && found.length <= 11, `${low} ${high}: ${found}`);
    for (const level of found) assert.ok(level >= low * (1 - 1e-6) && level <= high * (1 + 1e-6));
    const logarithmic = logLevels(low, high);
    assert.ok(logarithmic.length >= 2, `${low} ${high}: ${logarithmic}`);
    assert.equal(new Set(levelTexts(found, unit)).size, found.length, `${levelTexts(found, unit)}`);
  }
  assert.deepEqual(levelTexts([200.1 * 2 ** 20, 200.2 * 2 ** 20], 'B'), ['200 MiB', '+102 KiB']);
});

test('rates are in the unit that fits them', () => {
  assert.deepEqual([0, 600, 999, 10_000, 999_800, 2.5e7, 1.2e9, 3e12].map(rate), ['0 B/s', '600 B/s', '999 B/s', '10.0 kB/s', '1.00 MB/s', '25.0 MB/s', '1.20 GB/s', '3.00 TB/s']);
  assert.deepEqual([quantity(600, 'B/s'), rate(NaN)], ['600 B/s', '–']);
});

test('values have units, and levels are round', () => {
  assert.deepEqual([quantity(0.0241, 's'), quantity(3 * 2 ** 30, 'B'), quantity(1.2e9, 'B/s'), quantity(0.374, '1'), quantity(37, '%'), quantity(12.5, '1/s')], ['24.1 ms', '3.00 GiB', '1.20 GB/s', '37 %', '37.0 %', '12.5/s']);
  assert.deepEqual([quantity(NaN, 's'), quantity(-Infinity, '')], ['NaN', '−∞']);
  assert.deepEqual([number(0.123456), number(42), number(1e-5), number(0)], ['0.1235', '42', '1.00·10⁻⁵', '0']);
  assert.deepEqual(levels(0, 1, '', 2.5), [0, 0.5, 1]);
  assert.deepEqual(levels(0, 2.2 * 2 ** 30, 'B', 2.5), [0, 2 ** 30, 2 * 2 ** 30]);
  assert.deepEqual(levels(3, 3, '', 3), []);
  assert.deepEqual([logLevels(0.05, 20), logLevels(1.2, 8), logLevels(1e-9, 1)], [[0.1, 1, 10], [2, 5], [1e-9, 1e-6, 0.001, 1]]);
});
