import type { NotebookPanel } from '@jupyterlab/notebook';

/** `cell [7] line 4`, as the kernel writes where a collective was asked for. */
const CELL = /^cell \[(\d+)\](?: line (\d+))?/;
/** `train.py:33`. */
const FILE = /^(.+):(\d+)$/;

export interface Place {
  cell?: number;
  file?: string;
  line: number;
}

export function parseSite(site: string): Place | null {
  const cell = site.match(CELL);
  if (cell) return { cell: Number(cell[1]), line: Number(cell[2] ?? 1) };
  const file = site.match(FILE);
  return file ? { file: file[1], line: Number(file[2]) } : null;
}

/** Which cell was run as this number; -1 if there is none. `source` is what was run then, if that is known. */
function findCell(notebook: NotebookPanel, number: number, source: string | undefined): number {
  const cells = notebook.content.model?.cells;
  let same = -1;
  for (let i = 0; cells && i < cells.length; i++) {
    const model = cells.get(i);
    if (model.type !== 'code') continue;
    if ((model as { executionCount?: number | null }).executionCount === number) return i;
    if (source !== undefined && model.sharedModel.source === source) same = i;
  }
  return same;
}

/** Puts the cursor on a line of the cell that was run as this number. Returns whether there is such a cell. */
export async function jumpToCell(notebook: NotebookPanel, number: number, line: number, source?: string): Promise<boolean> {
  const { content } = notebook;
  const found = findCell(notebook, number, source);
  if (found < 0) return false;
  content.activeCellIndex = found;
  content.mode = 'edit';
  const cell = content.widgets[found];
  await content.scrollToItem(found, 'smart');
  await cell.ready;
  const { editor } = cell;
  if (editor) {
    const row = Math.min(Math.max(0, line - 1), editor.lineCount - 1);
    editor.setCursorPosition({ line: row, column: 0 });
    editor.revealPosition({ line: row, column: 0 });
    editor.focus();
  }
  return true;
}
