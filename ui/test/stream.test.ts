import assert from 'node:assert/strict';
import { mock, test } from 'node:test';
import { POINT_BYTES, readPoints } from '../src/model/series.ts';
import { ROW_BYTES, Store } from '../src/model/store.ts';
import { ASK_AGAIN, Stream, type Model } from '../src/model/stream.ts';

const NO_POINTS = { seriesFrom: 0, series: [], points: 0, pointsFrom: 0, pointsTo: 0, pointsLost: 0 };

function setUp() {
  const sent: { type: string; since: number; points: number }[] = [];
  const model: Model = { get: () => null, on() {}, off() {}, send: content => sent.push(content as never) };
  const store = new Store();
  const stream = new Stream(store, model);
  /** Rows `from` to `to` - 1; row k arrives at k. */
  const message = (from: number, to: number, after = from, cleared = 0) => {
    const view = new DataView(new ArrayBuffer((to - from) * ROW_BYTES));
    for (let k = from; k < to; k++) view.setFloat64((k - from) * 8, k, true);
    const text = { type: 'rows', after, from, count: to - from, namesFrom: 0, names: [''], sites: [''], marks: [], cleared, lost: 0, clockErrors: [], ...NO_POINTS };
    return stream.receive(text as never, [view, new DataView(new ArrayBuffer(0))]);
  };
  /** Points `from` to `to` - 1 of the one series; point k is measured at k. */
  const points = (from: number, to: number, seriesFrom = 0) => {
    const columns = readPoints(new ArrayBuffer((to - from) * POINT_BYTES), to - from);
    for (let k = from; k < to; k++) [columns.time[k - from], columns.number[k - from]] = [k, k - from];
    const series = seriesFrom ? [] : [{ rank: 0, name: 'loss', unit: '' }];
    const text = { type: 'rows', after: 0, from: 0, count: 0, namesFrom: 0, names: [], sites: [], marks: [], lost: 0, clockErrors: [], seriesFrom, series, points: to - from, pointsFrom: from, pointsTo: to, pointsLost: 0 };
    return stream.receive(text as never, [new DataView(new ArrayBuffer(0)), new DataView(columns.time.buffer)]);
  };
  const arrivals = () => Array.from(store.lanes[0]?.arrival.subarray(0, store.lanes[0].n) ?? []);
  return { sent, stream, message, points, arrivals, store };
}

test('rows that come twice are taken once', () => {
  const { message, arrivals, sent } = setUp();
  message(0, 3);
  message(0, 5);
  message(2, 4);
  message(5, 6);
  assert.deepEqual(arrivals(), [0, 1, 2, 3, 4, 5]);
  assert.deepEqual(sent, []);
});

test('who missed something asks for it once and takes nothing before it comes', () => {
  const { message, arrivals, sent } = setUp();
  assert.equal(message(4, 6), false);
  assert.equal(message(6, 8), false);
  assert.deepEqual(sent, [{ type: 'hello', since: 0, points: 0 }]);
  message(0, 8);
  assert.deepEqual(arrivals(), [0, 1, 2, 3, 4, 5, 6, 7]);
  message(9, 10);
  assert.deepEqual(sent[1], { type: 'hello', since: 8, points: 0 });
});

test('rows whose answer was lost are asked for again, at ever longer intervals', () => {
  mock.timers.enable({ apis: ['Date'], now: 1000 });
  try {
    const { message, arrivals, sent } = setUp();
    const asked = () => {
      message(4, 6);
      return sent.length;
    };
    assert.equal(asked(), 1);
    mock.timers.tick(ASK_AGAIN - 1);
    assert.equal(asked(), 1);
    mock.timers.tick(1);
    assert.equal(asked(), 2);
    mock.timers.tick(ASK_AGAIN);
    assert.equal(asked(), 2, 'a busy kernel would answer each of them when its cell ends');
    mock.timers.tick(ASK_AGAIN);
    assert.equal(asked(), 3);
    message(0, 6);
    assert.deepEqual(arrivals(), [0, 1, 2, 3, 4, 5]);
    message(9, 10);
    mock.timers.tick(ASK_AGAIN);
    message(10, 11);
    assert.equal(sent.length, 5);
  } finally {
    mock.timers.reset();
  }
});

test('what exists no more is not asked for', () => {
  const { message, arrivals, sent } = setUp();
  message(100, 102, 0);
  message(200, 201, 102);
  assert.deepEqual(arrivals(), [100, 101, 200]);
  assert.deepEqual(sent, []);
});

test('rows that were dropped count for the page that lacks them, and for no other', () => {
  const pages = [setUp(), setUp(), setUp()];
  pages[0].message(0, 1000);
  pages[1].message(0, 500);
  // The second says hello; all of them get the answer. The third has just been opened.
  for (const { message } of pages) message(900, 1000, 500);
  pages[2].message(900, 1000, 0);
  assert.deepEqual(pages.map(({ store }) => store.lostBefore), [0, 400, 900]);
  for (const { message } of pages) message(1000, 1001);
  assert.deepEqual(pages.map(({ store }) => store.lostBefore), [0, 400, 900]);
  for (const { message } of pages) message(1010, 1011, 1001, 1005);
  assert.deepEqual(pages.map(({ store }) => store.lostBefore), [5, 5, 5], 'a clear forgets those before it as well');
});

test('what was cleared is forgotten, once, and what comes then is not', () => {
  const { message, arrivals, sent, store } = setUp();
  message(0, 3);
  store.marks.set(0, { kind: 'cell', rank: 0, begin: 0, end: 2, text: '[1]', ok: true });
  const before = store.version;
  assert.equal(message(3, 3, 3, 3), true);
  assert.deepEqual([arrivals(), store.count, store.marks.size, store.forgotten], [[], 0, 0, 0]);
  assert.ok(store.version > before);
  message(3, 6, 3, 3);
  assert.deepEqual(arrivals(), [3, 4, 5]);
  // It was cleared between what came and what comes.
  message(9, 10, 6, 8);
  assert.deepEqual([arrivals(), store.begin, sent.length], [[9], 9, 0]);
});

test('who comes when all was cleared has nothing to forget', () => {
  const { message, arrivals, store } = setUp();
  message(5, 6, 0, 5);
  assert.deepEqual([arrivals(), store.cleared], [[5], 0]);
});

test('points come with the rows; who missed some, or what they are of, asks for them', () => {
  const { points, sent, store } = setUp();
  assert.equal(points(0, 3, 1), false);
  assert.equal(sent.length, 1);
  points(0, 3);
  points(2, 5, 1);
  assert.deepEqual([store.series.count, store.series.next], [5, 5]);
  assert.equal(points(9, 10, 1), false);
  assert.deepEqual(sent[1], { type: 'hello', since: 0, points: 5 });
  points(5, 10);
  assert.deepEqual([store.series.count, store.series.all.length, sent.length], [10, 1, 2]);
});
