import assert from 'node:assert/strict';
import { test } from 'node:test';
import { apart, duration, ranks, ticks } from '../src/draw/format.ts';
import { paletteFor, type Rgb } from '../src/draw/palette.ts';
import { paintTrack } from '../src/draw/raster.ts';
import { Operations } from '../src/model/operations.ts';
import { search, findNext, quantile, statistics } from '../src/model/statistics.ts';
import { FAILED, NOT_STARTED, ROW_BYTES, Store, readRows, type Rows } from '../src/model/store.ts';
import { Track } from '../src/model/tracks.ts';
import { Viewport } from '../src/model/viewport.ts';

interface One {
  rank: number;
  op?: number;
  size?: number;
  arrival: number;
  ready?: number;
  started?: number;
  finished: number;
  name?: number;
  nbytes?: number;
  kind?: number;
  flags?: number;
}

/** Rows as they come from the kernel: one buffer with column after column. */
function rows(...all: One[]): Rows {
  const buffer = new ArrayBuffer(all.length * ROW_BYTES);
  const columns = readRows(buffer, all.length);
  all.forEach((one, i) => {
    columns.rank[i] = one.rank;
    columns.op[i] = one.op ?? 0;
    columns.size[i] = one.size ?? 0;
    columns.arrival[i] = one.arrival;
    columns.ready[i] = (one.ready ?? one.started ?? one.arrival) - one.arrival;
    columns.started[i] = (one.started ?? one.arrival) - one.arrival;
    columns.finished[i] = one.finished - one.arrival;
    columns.name[i] = one.name ?? 0;
    columns.nbytes[i] = one.nbytes ?? 0;
    columns.kind[i] = one.kind ?? 0;
    columns.flags[i] = one.flags ?? 0;
  });
  return columns;
}

function intervals(track: Track): number[][] {
  return Array.from({ length: track.n }, (_, i) => [track.start[i], track.end[i]]);
}

/** Numbers that look random and are the same each time. */
function random(seed: number): () => number {
  return () => (seed = (Math.imul(seed, 1103515245) + 12345) >>> 0) / 2 ** 32;
}

test('united intervals are the union, whatever their order', () => {
  const next = random(7);
  for (let round = 0; round < 50; round++) {
    const track = new Track();
    const covered = new Uint8Array(400);
    for (let k = 0; k < 40; k++) {
      const from = Math.floor(next() * 380);
      const to = from + 1 + Math.floor(next() * 18);
      track.unite(from, to);
      covered.fill(1, from, to);
    }
    const drawn = new Uint8Array(400);
    let before = -1;
    for (const [from, to] of intervals(track)) {
      assert.ok(from > before, 'in order and apart');
      before = to;
      drawn.fill(1, from, to);
    }
    assert.deepEqual(drawn, covered);
    assert.equal(track.sum[track.n], covered.reduce((a, b) => a + b, 0));
    for (const [from, to] of [[0, 400], [13, 14], [100, 222], [399, 400]])
      assert.equal(track.covered(from, to), covered.slice(from, to).reduce((a, b) => a + b, 0));
  }
});

test('a track forgets what ended before a time and keeps the sums', () => {
  const track = new Track();
  for (let k = 0; k < 1000; k++) track.push(k * 10, k * 10 + 4, k % 3, k);
  track.dropBefore(5000);
  assert.deepEqual([track.n, track.start[0], track.row[0]], [500, 5000, 500]);
  assert.equal(track.covered(5000, 10000), 2000);
  assert.equal(track.at(7001), 200);
  assert.equal(track.at(7007, 1), -1);
  assert.equal(track.at(7008, 4), 201);
});

test('who came last is known once all ranks are there', () => {
  const store = new Store();
  store.append(rows({ rank: 0, op: 5, size: 3, arrival: 100, ready: 350, finished: 400 }, { rank: 1, op: 5, size: 3, arrival: 120, ready: 350, finished: 400 }));
  assert.deepEqual(store.lanes.map(lane => lane.late.n), [0, 0]);
  store.append(rows({ rank: 2, op: 5, size: 3, arrival: 350, ready: 351, finished: 402 }));
  const [, , late] = store.lanes;
  assert.deepEqual([late.late.n, late.late.covered(0, 1000), store.lateness(late, 0)], [1, 250, 250]);
  assert.deepEqual(intervals(late.late), [[100, 350]]);
  assert.deepEqual(intervals(store.lanes[0].wait), [[100, 350]]);
});

test('a lead within the error of the clocks makes nobody the last', () => {
  const store = new Store();
  store.clockError.set(1, 500);
  store.append(rows({ rank: 0, op: 1, size: 2, arrival: 0, finished: 2000 }, { rank: 1, op: 1, size: 2, arrival: 900, finished: 2000 }));
  assert.equal(store.lanes[1].late.n, 0);
  store.append(rows({ rank: 0, op: 2, size: 2, arrival: 3000, finished: 9000 }, { rank: 1, op: 2, size: 2, arrival: 4200, finished: 9000 }));
  assert.equal(store.lanes[1].late.n, 1);
});

test('operations are found by number until newer ones need their place', () => {
  const operations = new Operations();
  for (let id = 1; id <= 700_000; id++) operations.arrive(id, id % 4, id * 10, 2);
  assert.equal(operations.get(700_000)?.first, 7_000_000);
  assert.equal(operations.get(300_000)?.first, 3_000_000);
  assert.equal(operations.get(1), undefined);
  assert.equal(operations.arrive(1, 0, 5, 2), false);
  assert.equal(operations.get(0), undefined);
});

test('fused tensors are one interval with all their rows', () => {
  const store = new Store();
  store.append(rows(...[100, 130, 160].map((arrival, name) => ({ rank: 0, arrival, started: 300, finished: 500, name, nbytes: 8 }))));
  const [lane] = store.lanes;
  assert.deepEqual([lane.work.n, lane.work.rows[0], lane.work.row[0], lane.n], [1, 3, 0, 3]);
  assert.deepEqual(intervals(lane.wait), [[100, 300]]);
});

test('what failed before it started is a wait and no work', () => {
  const store = new Store();
  store.append(rows({ rank: 0, arrival: 10, finished: 90, flags: FAILED | NOT_STARTED | 2 }));
  assert.deepEqual(intervals(store.lanes[0].wait), [[10, 90]]);
  assert.equal(store.lanes[0].work.n, 0);
});

test('memory is bounded and what was forgotten is counted', () => {
  const store = new Store(8192);
  for (let k = 0; k < 50_000; k++) store.append(rows({ rank: k % 4, arrival: k * 10, started: k * 10 + 2, finished: k * 10 + 5 }));
  assert.ok(store.count <= 8192 && store.count > 6000, `${store.count}`);
  assert.equal(store.count + store.forgotten, 50_000);
  assert.equal(store.count, store.lanes.reduce((sum, lane) => sum + lane.n, 0));
  const [lane] = store.lanes;
  assert.equal(lane.work.row[0], lane.dropped);
  assert.equal(lane.arrival[0], store.begin);
});

test('statistics are those of the rows', () => {
  const store = new Store();
  store.names.push('grad.a', 'loss');
  for (let k = 0; k < 100; k++)
    for (const rank of [0, 1])
      store.append(rows({ rank, op: k + 1, size: 2, arrival: k * 1000 + rank * 50, ready: k * 1000 + 50, started: k * 1000 + 100, finished: k * 1000 + 101 + k, name: k % 10 ? 1 : 2, nbytes: 64 }));
  const all = statistics(store, 0, 1e9);
  assert.deepEqual([all.rows, all.operations, all.names.length], [200, 100, 2]);
  const grad = all.names.find(one => one.name === 'grad.a')!;
  assert.deepEqual([grad.count, grad.nbytes, grad.p50, grad.p99, grad.failed], [90, 90 * 64, 50, 100, 0]);
  assert.deepEqual(all.ranks.map(one => [one.timesLast, one.heldUp, one.worst]), [[0, 0, 0], [100, 5000, 50]]);
  const some = statistics(store, 10_000, 20_000, search(store, 'LOSS')!.names);
  assert.deepEqual(some.names.map(one => [one.name, one.count]), [['loss', 1]]);
  const [first] = statistics(store, 0, 1000).names;
  assert.deepEqual([first.name, first.count, first.total, first.wait], ['loss', 1, 1, 25], 'rank 0 waited 50 ns and rank 1 none');
  assert.deepEqual(statistics(store, 0, 1e9, null, new Set([1])).rows, 100);
  assert.deepEqual(findNext(store, search(store, 'loss')!.names, 15_000), [0, 20]);
  assert.deepEqual(findNext(store, search(store, 'loss')!.names, 15_000, true)?.[1], 10);
});

test('sums in bins are what the intervals cover, at every width and while they grow', () => {
  const next = random(3);
  const pushed = new Track();
  const united = new Track();
  let at = 0;
  for (let k = 0; k < 6000; k++) {
    at += 20 + 200 * next() ** 4 + (k === 3000 ? 400_000 : 0);
    const end = at + 5 + 60 * next();
    pushed.push(at, end, k % 3, k);
    // As waits come: later ones may begin earlier, and overlap.
    united.unite(at - 40 * next(), end);
    at = end;
  }
  const compare = (track: Track) => {
    assert.ok(track.density);
    for (const pixel of [3000, 9000, 20_000]) {
      assert.ok(track.density!.fits(pixel), `${pixel}`);
      const width = Math.floor(at / pixel) + 3;
      const [shares, kinds] = [new Float32Array(width), new Uint8Array(width)];
      const from = -1.3 * pixel;
      track.density!.read(from, pixel, shares, kinds);
      let sum = 0;
      for (let x = 0; x < width; x++) {
        const here = from + x * pixel;
        // Bins lie as a whole in one pixel or the next, so a quarter of a pixel may be counted with a neighbour.
        const least = track.covered(here + pixel / 4, here + (pixel * 3) / 4) / pixel;
        const most = track.covered(here - pixel / 2, here + pixel * 1.5) / pixel;
        assert.ok(shares[x] >= least * 0.75 - 0.01 && shares[x] <= most * 1.34 + 0.01, `${pixel} ${x}: ${least} ${shares[x]} ${most}`);
        sum += shares[x] * pixel;
      }
      assert.ok(Math.abs(sum / track.covered(-1e9, 1e9) - 1) < 0.1, `${sum}`);
    }
  };
  compare(pushed);
  compare(united);
  for (const time of [at * 0.2, at * 0.4, at * 0.6, at * 0.7]) {
    pushed.dropBefore(time);
    united.dropBefore(time);
    const shares = new Float32Array(Math.floor(time / 2000) - 2);
    pushed.density!.read(0, 2000, shares, new Uint8Array(shares.length));
    assert.ok(shares.every(share => share === 0), 'what was forgotten is not drawn');
  }
  compare(pushed);
  compare(united);
});

test('what was searched for is a track of its own, also of rows that come later', () => {
  const store = new Store(2048);
  store.names.push('grad.a', 'loss');
  const add = (from: number, to: number) => {
    for (let k = from; k < to; k++)
      store.append(rows(...[1, k % 5 ? 1 : 2].map(name => ({ rank: 0, arrival: k * 100, started: k * 100 + 10, finished: k * 100 + 50, name }))));
  };
  add(0, 500);
  const found = search(store, 'loss')!;
  const [lane] = store.lanes;
  assert.equal(found.track(lane).n, 100);
  add(500, 600);
  assert.equal(found.track(lane).n, 120);
  assert.deepEqual(intervals(found.track(lane))[119], [59510, 59550]);
  add(600, 3000);
  found.track(lane);
  assert.equal(search(store, 'nothing')!.track(lane).n, 0);
  assert.equal(search(store, ' '), null);
});

test('quantiles are values that were measured', () => {
  assert.equal(quantile(Float64Array.of(1, 2, 3, 4), 0.5), 2);
  assert.equal(quantile(Float64Array.of(1, 2, 3, 4), 0.99), 4);
  assert.ok(Number.isNaN(quantile(new Float64Array(0), 0.5)));
});

test('the view follows, stands still when moved, and zooms around a point', () => {
  const view = new Viewport();
  view.data(0, 20e9);
  assert.deepEqual([view.from, view.to], [15e9, 20e9]);
  view.pan(-5e9);
  assert.equal(view.data(0, 30e9), false);
  assert.deepEqual([view.from, view.to], [10e9, 15e9]);
  view.zoom(0.5, 11e9);
  assert.deepEqual([view.from, view.to], [10.5e9, 13e9]);
  view.follow(true);
  assert.deepEqual([view.from, view.to], [27.5e9, 30e9]);
  view.zoom(0.1);
  assert.equal(view.to, 30e9);
  view.fit();
  assert.ok(view.from < 0 && view.to > 30e9 && !view.following);
  for (let k = 0; k < 200; k++) view.zoom(0.5, 1e9);
  assert.ok(view.length >= 199);
});

test('the ends of wide spans are at their pixels; narrow ones are as strong as they cover', () => {
  const track = new Track();
  track.push(100, 200, 0, 0);
  for (let k = 0; k < 50; k++) track.push(300 + k * 2, 301 + k * 2, 1, k);
  const out = new Uint32Array(50).fill(0xff000000);
  paintTrack(out, track, { from: 0, to: 500, scale: 0.1, width: 50 }, Uint32Array.of(0xff0000ff, 0xff00ff00), 1, 0);
  const red = Array.from(out, pixel => pixel & 255);
  assert.deepEqual(red.slice(9, 21), [0, ...Array(10).fill(255), 0]);
  const green = Array.from(out, pixel => (pixel >>> 8) & 255);
  for (const pixel of green.slice(30, 40)) assert.ok(Math.abs(pixel - 127) < 3, `${pixel}`);
  assert.deepEqual([green[29], green[40]], [0, 0]);
});

/** Colours as people without one of the kinds of cones see them (Viénot, Brettel and Mollon 1999; linear light). */
function dichromat(colour: Rgb, kind: 'protan' | 'deutan'): number[] {
  const [r, g, b] = colour.map(v => (v / 255) ** 2.2);
  const mix = kind === 'protan' ? 0.11238 * r + 0.88762 * g : 0.29275 * r + 0.70725 * g;
  const blue = kind === 'protan' ? 0.00401 * r - 0.00401 * g + b : -0.02234 * r + 0.02234 * g + b;
  return [mix, mix, blue].map(v => Math.max(0, v) ** (1 / 2.2) * 255);
}

test('what is late differs from everything else, also for the colour-blind', () => {
  for (const background of [[255, 255, 255], [17, 17, 17]] as Rgb[]) {
    const palette = paletteFor(background);
    for (const kind of ['protan', 'deutan'] as const)
      for (const other of [palette.wait, palette.lane, ...palette.kinds.slice(0, 2)]) {
        const [a, b] = [dichromat(palette.late, kind), dichromat(other, kind)];
        assert.ok(Math.hypot(a[0] - b[0], a[1] - b[1], a[2] - b[2]) > 60, `${kind} ${other} on ${background}`);
      }
  }
});

test('texts', () => {
  assert.equal(duration(24_123_000), '24.1 ms');
  assert.equal(duration(950), '950 ns');
  assert.equal(duration(1_500), '1.50 µs');
  assert.equal(ranks([0, 1, 2, 5]), 'ranks 0–2, 5');
  assert.deepEqual(ticks(0, 1e9, 550).map(tick => tick.text), ['0.0 s', '0.2 s', '0.4 s', '0.6 s', '0.8 s', '1.0 s']);
  assert.equal(ticks(1e9, 1e9 + 1000, 500)[1].text, '1.0000005 s');
});

test('what ends with the view is counted as seen, also the newest while following, and nothing that ends later', () => {
  const store = new Store();
  const view = new Viewport();
  for (let k = 0; k < 50; k++) {
    const at = 0.3 + k * 1000.7;
    store.append(rows({ rank: 0, op: k + 1, size: 2, arrival: at, finished: at + 333.3 }, { rank: 1, op: k + 1, size: 2, arrival: at + 5, finished: at + 333.3 }));
    view.data(store.begin, store.end);
    assert.equal(view.to, store.end);
    assert.equal(statistics(store, ...view.seen).rows, store.count, `after ${store.count}`);
  }
  const last = store.end;
  view.show(store.begin, last - 1000.7);
  assert.equal(statistics(store, ...view.seen).rows, store.count - 2);
  view.show(store.begin, last - 10);
  assert.equal(statistics(store, ...view.seen).rows, store.count - 2);
});

test('operations keep what is known of them while their table grows', () => {
  const operations = new Operations();
  const next = random(11);
  const came = new Map<number, number[]>();
  for (let id = 1; id < 6000; id += 1 + Math.floor(next() * 2)) came.set(id, [next(), next(), next()]);
  // The last arrivals come when the table has grown since the first ones, and in another order.
  for (const rank of [0, 1]) for (const [id, times] of came) operations.arrive(id, rank, times[rank], 3);
  for (const [id, times] of [...came].reverse()) assert.equal(operations.arrive(id, 2, times[2], 3), true);
  for (const [id, times] of came) {
    const found = operations.get(id)!;
    const sorted = [...times].sort((a, b) => a - b);
    assert.deepEqual([found.first, found.last, found.lead, found.lastRank, found.count], [sorted[0], sorted[2], sorted[2] - sorted[1], times.indexOf(sorted[2]), 3]);
    assert.equal(came.has(id + 1) ? undefined : operations.get(id + 1), undefined);
  }
});

test('lanes with as many rows do not all make room in the same message', () => {
  const store = new Store();
  const grew = (before: number[]) => store.lanes.filter((lane, i) => lane.arrival.length !== before[i]).length;
  let [most, sum] = [0, 0];
  for (let k = 0; k < 200; k++) {
    const before = store.lanes.map(lane => lane.arrival.length);
    store.append(rows(...Array.from({ length: 16 * 20 }, (_, i) => ({ rank: i % 16, arrival: k * 100 + i, finished: k * 100 + i + 1 }))));
    if (!k) continue;
    most = Math.max(most, grew(before));
    sum += grew(before);
  }
  assert.ok(sum >= 16 * 3);
  assert.ok(most <= 4, String(most));
});

test('a million spans take a bounded number of bytes each', () => {
  const store = new Store();
  const lanes = 64;
  for (let sent = 0, op = 0; sent < 1_000_000; ) {
    const buffer = new ArrayBuffer(64_000 * ROW_BYTES);
    const columns = readRows(buffer, 64_000);
    for (let i = 0; i < columns.count; i++) {
      const rank = i % lanes;
      if (!rank) op++;
      columns.rank[i] = rank;
      columns.op[i] = op;
      columns.size[i] = lanes;
      columns.arrival[i] = op * 1e6 + rank;
      [columns.ready[i], columns.started[i], columns.finished[i]] = [1e5, 1.1e5, 5e5];
    }
    store.append(columns);
    sent += columns.count;
  }
  const seen = new Set<unknown>();
  const bytes = (one: unknown): number => {
    if (!one || typeof one !== 'object' || seen.has(one)) return 0;
    seen.add(one);
    if (ArrayBuffer.isView(one)) return one.byteLength;
    const parts: unknown[] = one instanceof Map ? [...one.values()] : Object.values(one);
    return parts.reduce((sum: number, part) => sum + bytes(part), 0);
  };
  assert.ok(ROW_BYTES <= 64);
  assert.ok(store.count > 850_000);
  const each = bytes(store) / store.count;
  assert.ok(each <= 200, `${each} bytes`);
});

test('long names are told by what they differ in', () => {
  const long = [0, 1, 10].map(k => `DistributedOptimizer.module.encoder.layers.${k}.attention.weight`);
  assert.deepEqual(apart(long), ['…0.attention.weight', '…1.attention.weight', '…10.attention.weight']);
  assert.deepEqual(apart([...long, 'loss']), [...long, 'loss']);
  assert.deepEqual(apart(['grad.a', 'grad.b']), ['grad.a', 'grad.b']);
  assert.deepEqual(apart([long[0], long[0]]), [long[0], long[0]]);
  assert.deepEqual(apart([]), []);
});

test('the collectives of a single rank are counted, and nobody is last', () => {
  const store = new Store();
  for (let k = 0; k < 7; k++) store.append(rows({ rank: 0, op: k + 1, size: 1, arrival: k * 100, finished: k * 100 + 50, name: 1 }));
  const found = statistics(store, -Infinity, Infinity);
  assert.deepEqual([found.rows, found.operations, found.ranks[0].timesLast], [7, 7, 0]);
});
