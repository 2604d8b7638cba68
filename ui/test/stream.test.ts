import assert from 'node:assert/strict';
import { test } from 'node:test';
import { ROW_BYTES, Store } from '../src/model/store.ts';
import { Stream, type Model } from '../src/widget/stream.ts';

function setUp() {
  const sent: { type: string; since: number }[] = [];
  const model: Model = { get: () => null, on() {}, off() {}, send: content => sent.push(content as never) };
  const store = new Store();
  const stream = new Stream(store, model);
  /** Rows `from` to `to` - 1; row k arrives at k. */
  const message = (from: number, to: number, after = from) => {
    const view = new DataView(new ArrayBuffer((to - from) * ROW_BYTES));
    for (let k = from; k < to; k++) view.setFloat64((k - from) * 8, k, true);
    const text = { type: 'rows', after, from, count: to - from, namesFrom: 0, names: [''], sites: [''], marks: [], lost: 0, clockErrors: [] };
    return stream.receive(text as never, [view]);
  };
  const arrivals = () => Array.from(store.lanes[0]?.arrival.subarray(0, store.lanes[0].n) ?? []);
  return { sent, stream, message, arrivals, store };
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
  assert.deepEqual(sent, [{ type: 'hello', since: 0 }]);
  message(0, 8);
  assert.deepEqual(arrivals(), [0, 1, 2, 3, 4, 5, 6, 7]);
  message(9, 10);
  assert.deepEqual(sent[1], { type: 'hello', since: 8 });
});

test('what exists no more is not asked for', () => {
  const { message, arrivals, sent } = setUp();
  message(100, 102, 0);
  message(200, 201, 102);
  assert.deepEqual(arrivals(), [100, 101, 200]);
  assert.deepEqual(sent, []);
});
