import type { Viewport } from '../model/viewport.ts';
import type { Choice } from './choice.ts';

/** What keys ask for beyond the view and what is chosen. */
export interface KeyCommands {
  search(): void;
  help(): void;
  charts(): void;
  open(): void;
  forget(): void;
}

const SAME: Record<string, string> = { '+': 'w', '=': 'w', '-': 's', _: 's', arrowleft: 'a', arrowright: 'd' };

/** What a key does; `undefined` if it does nothing here. */
export function actionOf(key: string, shift: boolean, view: Viewport, choice: Choice, commands: KeyCommands): (() => void) | undefined {
  const far = shift ? 0.5 : 0.12;
  const keys: Record<string, () => void> = {
    w: () => view.zoom(1 / 1.25),
    s: () => view.zoom(1.25),
    a: () => view.pan(-view.length * far),
    d: () => view.pan(view.length * far),
    f: () => view.fit(),
    home: () => view.toBegin(),
    end: () => view.toEnd(),
    ' ': () => view.follow(!view.following),
    m: () => choice.between(...view.seen),
    z: () => choice.zoom(),
    x: () => choice.toggle(shift),
    o: () => commands.open(),
    g: () => commands.charts(),
    '/': () => commands.search(),
    enter: () => choice.next(shift),
    escape: () => commands.forget(),
    arrowup: () => choice.stepRow(-1),
    arrowdown: () => choice.stepRow(1),
    '[': () => choice.step(-1),
    ']': () => choice.step(1),
    '?': () => commands.help(),
  };
  const name = key.toLowerCase();
  return keys[SAME[name] ?? name];
}
