// Elements without HTML text: whatever comes from a run is set as text, and stays text.
const SVG = 'http://www.w3.org/2000/svg';

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'style') for (const [property, set] of Object.entries(value)) element.style.setProperty(property, set);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat(2).filter(child => child !== null && child !== undefined && child !== false).map(child => child.nodeType ? child : String(child)));
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = id => document.getElementById(id);

// ---- numbers ----
const DASH = '–';
export const known = value => value !== null && value !== undefined;
export const whole = value => known(value) ? Math.round(value).toLocaleString('en-US') : DASH;
export const percent = share => known(share) ? `${(100 * share).toFixed(1)} %` : DASH;
export function short(value) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(size >= 1e7 ? 0 : 1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(size >= 1e5 ? 0 : 1)}k`;
  if (size >= 100 || Number.isInteger(value)) return whole(value);
  if (size >= 1) return value.toFixed(size >= 10 ? 1 : 2);
  return size < 1e-3 && size > 0 ? value.toExponential(1) : value.toFixed(3);
}
export function clock(seconds) {
  if (!known(seconds)) return DASH;
  const t = Math.max(0, Math.floor(seconds)), two = n => String(n).padStart(2, '0');
  return t >= 3600 ? `${Math.floor(t / 3600)}:${two(Math.floor(t / 60) % 60)}:${two(t % 60)}` : `${Math.floor(t / 60)}:${two(t % 60)}`;
}
export function ago(seconds) {
  const [size, unit] = seconds < 60 ? [1, 's'] : seconds < 3600 ? [60, 'min'] : seconds < 172800 ? [3600, 'h'] : [86400, 'days'];
  return `${Math.floor(seconds / size)} ${unit} ago`;
}
export const versions = (oldest, newest) => oldest < 0 ? DASH : oldest === newest ? `v${oldest}` : `v${oldest}–${newest}`;
