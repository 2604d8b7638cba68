import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Signal } from '@lumino/signaling';
import { removeEndedPrompts } from '../src/input_prompts.ts';

/** A cell that was run by the message `request`, with an open box in which a rank asks. */
function asking(request: string, prompt = '[rank 1] name: ') {
  const node = { classList: { contains: () => true }, querySelector: () => ({ textContent: prompt }) };
  const widgets: object[] = [];
  widgets.push({ node, dispose: () => widgets.splice(0) });
  return { outputArea: { widgets, future: { msg: { header: { msg_id: request } } } } };
}

/** A notebook of these cells; returns what ends a cell, and how often the kernel was released from its question. */
function notebook(...cells: object[]) {
  let released = 0;
  const sessionContext = { session: { kernel: { removeInputGuard: () => released++ } } };
  const iopubMessage = new Signal<object, unknown>(sessionContext);
  Object.assign(sessionContext, { iopubMessage });
  const panel = { sessionContext, content: { widgets: cells } };
  removeEndedPrompts({ forEach: (act: (one: object) => void) => act(panel), widgetAdded: new Signal<object, unknown>({}) } as never);
  const end = (request: string) => iopubMessage.emit({ header: { msg_type: 'status' }, content: { execution_state: 'idle' }, parent_header: { msg_type: 'execute_request', msg_id: request } });
  return { end, released: () => released };
}

test('the end of a cell removes its own boxes, and none of another cell', () => {
  const [first, second] = [asking('first'), asking('second')];
  const { end, released } = notebook({}, first, second);
  end('first');
  assert.deepEqual([first.outputArea.widgets.length, second.outputArea.widgets.length, released()], [0, 1, 1]);
  end('a completer');
  assert.deepEqual([second.outputArea.widgets.length, released()], [1, 1]);
  end('second');
  assert.deepEqual([second.outputArea.widgets.length, released()], [0, 2]);
});

test('boxes of other programs are left to them', () => {
  const cell = asking('first', 'name: ');
  const { end, released } = notebook(cell);
  end('first');
  assert.deepEqual([cell.outputArea.widgets.length, released()], [1, 0]);
});
