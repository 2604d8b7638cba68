import assert from 'node:assert/strict';
import { mock, test } from 'node:test';
import { Liveness, SILENCE, type Link } from '../src/model/liveness.ts';
import { watchKernel } from '../src/widget/kernel.ts';
import { Signal } from './page.ts';

function timed(act: () => void): void {
  mock.timers.enable({ apis: ['setTimeout', 'Date'], now: 1000 });
  try {
    act();
  } finally {
    mock.timers.reset();
  }
}

test('without news for five seconds a view of a running cell is silent, and live again with the next', () => {
  timed(() => {
    const seen: string[] = [];
    const one: Liveness = new Liveness(() => seen.push(one.standing));
    one.heard(true);
    mock.timers.tick(SILENCE - 1);
    one.heard(true);
    mock.timers.tick(SILENCE - 1);
    assert.deepEqual([one.standing, seen], ['live', []]);
    mock.timers.tick(1);
    assert.deepEqual([one.standing, seen, one.at], ['silent', ['silent'], 1000 + SILENCE - 1]);
    one.heard(true);
    assert.deepEqual(seen, ['silent', 'live']);
    one.dispose();
  });
});

test('where nothing runs nothing need come', () => {
  timed(() => {
    const one = new Liveness(() => undefined);
    one.heard(true);
    one.heard(false);
    mock.timers.tick(10 * SILENCE);
    assert.equal(one.standing, 'live');
  });
});

test('a connection comes back and a kernel that has ended does not', () => {
  timed(() => {
    const seen: string[] = [];
    const one: Liveness = new Liveness(() => seen.push(one.standing));
    one.heard(true);
    one.connected('away');
    mock.timers.tick(10 * SILENCE);
    assert.equal(one.standing, 'away');
    one.connected('here');
    assert.equal(one.standing, 'live');
    mock.timers.tick(SILENCE);
    one.connected('ended');
    one.connected('here');
    one.heard(true);
    assert.deepEqual(seen, ['away', 'live', 'silent', 'ended']);
  });
});

test('a page that was away asks for the news that it missed, and one that was silent need not', () => {
  timed(() => {
    let asked = 0;
    const one = new Liveness(() => undefined, () => asked++);
    one.heard(true);
    mock.timers.tick(SILENCE);
    one.heard(true);
    one.connected('away');
    assert.equal(asked, 0);
    one.connected('here');
    one.connected('here');
    assert.equal(asked, 1);
    one.connected('away');
    one.connected('ended');
    assert.equal(asked, 1);
    one.dispose();
  });
});

test('the kernel of a widget is the one that its page had when it was shown', () => {
  const kernel = { status: 'idle', connectionStatus: 'connected' };
  const [statusChanged, connectionStatusChanged, kernelChanged] = [new Signal(), new Signal(), new Signal()];
  const sessionContext = { session: { kernel } as { kernel: typeof kernel | null }, statusChanged, connectionStatusChanged, kernelChanged };
  const seen: Link[] = [];
  const end = watchKernel({ context: { sessionContext } }, 'timeline', link => seen.push(link));
  kernel.connectionStatus = 'connecting';
  connectionStatusChanged.emit();
  kernel.connectionStatus = 'connected';
  connectionStatusChanged.emit();
  kernel.status = 'restarting';
  statusChanged.emit();
  kernel.status = 'idle';
  sessionContext.session = { kernel: { ...kernel } };
  kernelChanged.emit();
  sessionContext.session = { kernel: null };
  kernelChanged.emit();
  assert.deepEqual(seen, ['here', 'away', 'here', 'ended', 'ended', 'ended']);
  end();
  assert.equal(connectionStatusChanged.acts.size, 0);
  assert.equal(statusChanged.acts.size + kernelChanged.acts.size, 2, 'the page goes on counting the ends of the session');
});

test('a widget that is shown once more after a restart has ended, and one of the new kernel has not', () => {
  const kernel = { status: 'idle', connectionStatus: 'connected' };
  const [statusChanged, connectionStatusChanged, kernelChanged] = [new Signal(), new Signal(), new Signal()];
  const manager = { context: { sessionContext: { session: { kernel }, statusChanged, connectionStatusChanged, kernelChanged } } };
  const seen: Link[] = [];
  const show = (widget: string) => watchKernel(manager, widget, link => seen.push(link));
  show('ranks')();
  kernel.status = 'restarting';
  statusChanged.emit();
  kernel.status = 'idle';
  statusChanged.emit();
  show('ranks')();
  show('ranks of the new kernel')();
  assert.deepEqual(seen, ['here', 'ended', 'here']);
});

test('where the page does not tell how the kernel is, silence does', () => {
  watchKernel(undefined, 'any', () => assert.fail())();
  watchKernel({ context: {} }, 'any', () => assert.fail())();
});
