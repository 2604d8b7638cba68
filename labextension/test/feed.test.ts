import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Signal } from '@lumino/signaling';
import { KernelFeed } from '../src/feed.ts';
import { OWN, STREAM } from '../src/kernel_channel.ts';

const page = { addEventListener() {}, removeEventListener() {}, setInterval: () => 0, hidden: false };
Object.assign(globalThis, { document: page, window: page });

/** A feed of an idle kernel without subshells, and the way in which that kernel sends to it. */
function setUp() {
  const kernel = { status: 'idle', connectionStatus: 'connected', info: Promise.resolve({}), spec: Promise.resolve(undefined), sendShellMessage() {} };
  const iopubMessage = new Signal<object, unknown>(kernel);
  Object.assign(kernel, { iopubMessage });
  const session = { session: { kernel } };
  const signals = ['kernelChanged', 'statusChanged', 'connectionStatusChanged'].map(name => [name, new Signal<object, unknown>(session)]);
  Object.assign(session, Object.fromEntries(signals));
  const feed = new KernelFeed(session as never, { __: (text: string) => text } as never, 1000);
  const send = (data: object, process = 'first process') =>
    iopubMessage.emit({ header: { msg_type: 'comm_msg', session: process }, content: { comm_id: STREAM, data } });
  const status = (now: string) => (session as unknown as { statusChanged: Signal<object, string> }).statusChanged.emit(now);
  feed.want(page, { pool: OWN, rows: false });
  return { feed, channel: feed.channel(OWN), send, status };
}

const RUNNING = { type: 'rows', pool: OWN, recording: 'first', heading: '1/1 ranks', ranks: [{ rank: 0, state: 'running' }] };

test('a picture whose ranks are gone has ended, and new ranks are live', () => {
  const { feed, channel, send } = setUp();
  send(RUNNING);
  assert.equal(channel.liveness.standing, 'live');
  send({ type: 'nothing', pool: OWN });
  assert.deepEqual([channel.liveness.standing, channel.ended], ['ended', true]);
  send({ ...RUNNING, recording: 'second' });
  assert.equal(channel.liveness.standing, 'live');
  feed.dispose();
});

test('a picture of a pool that can not be reached is of the past until rows come', () => {
  const { feed, channel, send } = setUp();
  send(RUNNING);
  send({ type: 'nothing', pool: OWN, text: 'there is no way to it' });
  assert.deepEqual([channel.liveness.standing, channel.problem], ['away', 'there is no way to it']);
  send(RUNNING);
  assert.deepEqual([channel.liveness.standing, channel.problem], ['live', '']);
  feed.dispose();
});

test('the last messages of a kernel that is restarted show no ranks as live', () => {
  const { feed, channel, send, status } = setUp();
  send(RUNNING);
  status('restarting');
  send(RUNNING); // on its way while the kernel ended
  assert.deepEqual([channel.liveness.standing, channel.ended, feed.here, channel.store.heading], ['ended', true, false, '']);
  send({ ...RUNNING, recording: 'second' }, 'second process');
  assert.deepEqual([channel.liveness.standing, feed.here], ['live', true]);
  feed.dispose();
});
