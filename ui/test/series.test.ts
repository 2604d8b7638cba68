import assert from 'node:assert/strict';
import { test } from 'node:test';
import { POINT_BYTES, SeriesStore, readPoints, type Points } from '../src/model/series.ts';

/** Points of series 0, numbered from 0, as they come from the kernel. */
function points(...all: [time: number, value: number, series?: number][]): Points {
  const columns = readPoints(new ArrayBuffer(all.length * POINT_BYTES), all.length);
  all.forEach(([time, value, series], i) => {
    columns.time[i] = time;
    columns.value[i] = value;
    columns.step[i] = NaN;
    columns.series[i] = series ?? 0;
    columns.number[i] = i;
  });
  return columns;
}

function one(limit?: number) {
  const store = new SeriesStore(limit);
  store.define(0, [{ rank: 0, name: 'loss', unit: '' }]);
  const [series] = store.all;
  return { store, series, read: () => Array.from({ length: series.n }, (_, i) => [series.time[i], series.value[i]]) };
}

test('points lie by time, and one that comes again for a time takes the place of the last', () => {
  const { store, read } = one();
  store.append(points([10, 1], [30, 3], [20, 2], [30, 4], [20, 5], [5, 0]), 0, 6);
  assert.deepEqual(read(), [[5, 0], [10, 1], [20, 5], [30, 4]]);
  assert.deepEqual([store.begin, store.end, store.next], [5, 30, 6]);
});

test('points that come twice are taken once', () => {
  const { store, read } = one();
  store.append(points([10, 1], [20, 2]), 0, 2);
  store.append(points([10, 9], [20, 9], [30, 3]), 0, 3);
  assert.deepEqual(read(), [[10, 1], [20, 2], [30, 3]]);
});

test('series are defined once and found by name, by rank', () => {
  const store = new SeriesStore();
  const definitions = [2, 0, 1].map(rank => ({ rank, name: 'cpu', unit: '%' }));
  store.define(0, definitions.slice(0, 2));
  store.define(0, definitions);
  assert.deepEqual(store.named.get('cpu')!.map(series => series.rank), [0, 1, 2]);
  assert.equal(store.of(2, 'cpu'), store.all[0]);
});

test('a series that is reported often takes no room from others, and what is forgotten is counted', () => {
  const { store, series } = one(2000);
  store.define(1, [{ rank: 0, name: 'epoch', unit: '' }]);
  store.append(points([0, 1, 1]), 0, 1);
  for (let k = 0; k < 50; k++) store.append(points(...Array.from({ length: 100 }, (_, i) => [k * 100 + i, i] as [number, number])), 1 + k * 100, 101 + k * 100);
  assert.equal(store.all[1].n, 1);
  assert.ok(series.n <= 1000 && series.n > 900, `${series.n}`);
  assert.equal(store.count + store.forgotten, 5001);
  assert.equal(series.time[series.n - 1], 4999);
});

test('the nearest measured point is found, and the last one before a time', () => {
  const { store, series } = one();
  assert.deepEqual([series.nearest(5), series.before(5)], [-1, -1]);
  store.append(points([10, 1], [20, 2], [40, 3]), 0, 3);
  assert.deepEqual([0, 14, 16, 29, 31, 99].map(time => series.nearest(time)), [0, 0, 1, 1, 2, 2]);
  assert.deepEqual([9, 10, 39, 40].map(time => series.before(time)), [-1, 0, 1, 2]);
});
