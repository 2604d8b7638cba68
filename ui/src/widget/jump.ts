/** A site in a cell: its execution count and line. */
export function cellOf(site: string): { cell: string; line: number } | null {
  const found = site.match(/^cell (\[\d+\]) line (\d+)$/);
  return found && { cell: found[1], line: Number(found[2]) };
}

/** Whether the page around a widget is a notebook whose cells it can show. */
export function canJump(): boolean {
  return document.querySelector('.jp-Notebook') !== null;
}

/** Brings a line of a cell of this page into sight and marks it for a moment; false if it is not in the page. */
export function jump(site: string): boolean {
  const at = cellOf(site);
  if (!at) return false;
  const prompts = [...document.querySelectorAll('.jp-Notebook .jp-InputPrompt')];
  const prompt = prompts.find(one => one.textContent?.trim().startsWith(at.cell));
  const cell = prompt?.closest('.jp-Cell');
  const lines = cell?.querySelectorAll<HTMLElement>('.cm-line');
  const line = lines?.[at.line - 1];
  const still = matchMedia('(prefers-reduced-motion: reduce)').matches;
  (line ?? cell)?.scrollIntoView({ block: 'center', behavior: still ? 'auto' : 'smooth' });
  line?.animate([{ background: 'rgba(213, 94, 0, 0.45)' }, { background: 'transparent' }], { duration: 2500, easing: 'ease-in' });
  return cell !== undefined && cell !== null;
}
