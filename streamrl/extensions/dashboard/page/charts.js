// Small charts as SVG: curves over steps with a cross hair that all of them share, and stacked bars.
import {h, known, s, short} from './dom.js';

const EDGE = {left: 42, right: 8, top: 8, bottom: 20};
const charts = new Set();  // drawn curves, to move their cross hairs together

function ticks(low, high, most) {
  const span = high - low || 1, rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(n => n * power).find(n => span / n <= most) ?? rough;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return found;
}

const tick = at => Math.abs(at) >= 1e4 ? short(at) : String(Number(at.toPrecision(4)));

const pathOf = (points, x, y) => {
  let path = '', open = false;
  for (const [step, value] of points) {
    if (known(value)) path += `${open ? 'L' : 'M'}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    open = known(value);
  }
  return path;
};

function near(points, step) {
  let best = null;
  for (const point of points) if (known(point[1]) && (!best || Math.abs(point[0] - step) < Math.abs(best[0] - step))) best = point;
  return best;
}

/** Curves of a panel. `range`: first and last step; `pick(step)` when one is clicked. */
export function curves(card, panel, range, goal, pick) {
  const width = Math.max(200, card.clientWidth - 34), height = 176;
  const drawn = panel.series.map(series => ({...series, main: series.line ?? series.points}));
  const values = drawn.flatMap(series => [...series.points, ...series.main]).map(point => point[1]).filter(known);
  if (known(goal)) values.push(goal);
  let low = Math.min(...values), high = Math.max(...values);
  if (low > 0 && low < high * .6) low = 0;
  if (low === high) { low -= Math.abs(low) * .1 || .5; high += Math.abs(high) * .1 || .5; }
  const last = Math.max(range[1], range[0] + 1);
  const x = step => EDGE.left + (step - range[0]) / (last - range[0]) * (width - EDGE.left - EDGE.right);
  const y = value => EDGE.top + (high - value) / (high - low) * (height - EDGE.top - EDGE.bottom);
  const cross = s('line', {class: 'cross', y1: EDGE.top, y2: height - EDGE.bottom, visibility: 'hidden'});
  const shown = drawn.map((series, index) => h('b', {}, ''));
  const legend = h('div', {class: 'legend'}, drawn.map((series, index) => h('span', {}, h('i', {class: `k${index % 8}`}), `${series.name} `, shown[index])));
  const hover = step => {
    cross.setAttribute('visibility', step === null ? 'hidden' : 'visible');
    if (step !== null) { cross.setAttribute('x1', x(step)); cross.setAttribute('x2', x(step)); }
    drawn.forEach((series, index) => { shown[index].textContent = short(near(series.main, step ?? last)?.[1]); });
  };
  const stepAt = event => {
    const box = svg.getBoundingClientRect();
    return Math.round(Math.min(last, Math.max(range[0], range[0] + (event.clientX - box.left - EDGE.left) / (width - EDGE.left - EDGE.right) * (last - range[0]))));
  };
  const svg = s('svg', {
    class: 'chart', viewBox: `0 0 ${width} ${height}`, height, role: 'img', 'aria-label': panel.title,
    onpointermove: event => charts.forEach(other => other(stepAt(event))), onpointerleave: () => charts.forEach(other => other(null)),
    onclick: event => pick(stepAt(event)),
  },
    ticks(low, high, 4).map(at => [s('line', {class: 'grid', x1: EDGE.left, x2: width - EDGE.right, y1: y(at), y2: y(at)}), s('text', {x: EDGE.left - 6, y: y(at) + 3.5, 'text-anchor': 'end'}, tick(at))]),
    ticks(range[0], last, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger).map(at => s('text', {x: x(at), y: height - 5, 'text-anchor': 'middle'}, at)),
    known(goal) && s('line', {class: 'goal', x1: EDGE.left, x2: width - EDGE.right, y1: y(goal), y2: y(goal)}),
    drawn.map((series, index) => series.line && s('path', {class: `raw k${index % 8}`, d: pathOf(series.points, x, y)})),
    drawn.map((series, index) => s('path', {class: `line k${index % 8}`, d: pathOf(series.main, x, y)})),
    drawn.map((series, index) => series.main.length === 1 && s('circle', {class: `fillk k${index % 8}`, r: 3, cx: x(series.main[0][0]), cy: y(series.main[0][1])})),
    cross, s('rect', {class: 'hit', width, height}));
  hover(null);
  charts.add(hover);
  card.replaceChildren(h('h2', {}, panel.title, h('span', {class: 'unit'}, panel.unit)), svg, legend);
  return () => charts.delete(hover);
}

/** Stacked bars, each as shares of what is in it. `colour(index)`: class or style of a layer. */
export function bars(place, names, rows, key, paint) {
  if (!rows.length) return place.replaceChildren(h('p', {class: 'empty'}, 'no batch yet'));
  const width = Math.max(200, place.clientWidth), height = 168, inner = width - EDGE.left - EDGE.right, tall = height - EDGE.top - EDGE.bottom;
  const wide = inner / rows.length;
  const totals = names.map((_, layer) => rows.reduce((sum, row) => sum + row[key][layer], 0));
  const shown = names.map(() => h('b', {}, ''));
  const title = h('span', {}, '');
  const legend = h('div', {class: 'legend'}, names.map((name, layer) => h('span', {}, h('i', paint(layer)), `${name} `, shown[layer])), title);
  const show = row => {
    const counts = row ? row[key] : totals, sum = counts.reduce((a, b) => a + b, 0) || 1;
    counts.forEach((count, layer) => { shown[layer].textContent = `${(100 * count / sum).toFixed(0)} %`; });
    title.textContent = row ? `batch ${row.first}${row.last > row.first ? `–${row.last}` : ''}: ${sum} rollouts` : '';
  };
  const svg = s('svg', {class: 'chart', viewBox: `0 0 ${width} ${height}`, height, role: 'img', onpointerleave: () => show(null)},
    [0, .5, 1].map(at => s('text', {x: EDGE.left - 6, y: EDGE.top + (1 - at) * tall + 3.5, 'text-anchor': 'end'}, `${100 * at} %`)),
    rows.map((row, index) => {
      const sum = row[key].reduce((a, b) => a + b, 0) || 1;
      let below = 0;
      const x = EDGE.left + index * wide;
      return s('g', {onpointerenter: () => show(row)}, row[key].map((count, layer) => {
        const part = count / sum * tall;
        below += part;
        const {class: name = '', style} = paint(layer);
        return count > 0 && s('rect', {class: `${name} fillk`, style, x: x.toFixed(2), y: (EDGE.top + tall - below).toFixed(2), width: Math.max(wide - Math.min(1, wide / 5), .5).toFixed(2), height: part.toFixed(2)});
      }));
    }),
    [0, Math.floor(rows.length / 2), rows.length - 1].filter((at, i, all) => all.indexOf(at) === i).map(at => s('text', {x: EDGE.left + (at + .5) * wide, y: height - 5, 'text-anchor': 'middle'}, rows[at].first)));
  show(null);
  place.replaceChildren(svg, legend);
}

export const layer = index => ({class: `k${index % 8}`});
export const ramp = (index, of) => ({style: {'--k': `color-mix(in oklab, var(--accent) ${of > 1 ? Math.round(28 + 72 * index / (of - 1)) : 100}%, var(--card))`, background: 'var(--k)', fill: 'var(--k)'}});

/** How rollouts ended: a bar for each env, and of each end its share of the sampled tokens. */
export function fates(place, rows, names) {
  const slug = name => `fate-${name.replace(' ', '-')}`;
  const total = rows.reduce((sum, row) => sum + row.published, 0);
  if (!total) return place.replaceChildren(h('p', {class: 'empty'}, 'no rollout yet'));
  const there = names.filter(name => rows.some(row => row.counts[name]));
  const sampled = name => rows.reduce((sum, row) => sum + (row.tokens[name] ?? 0), 0);
  const tokens = names.reduce((sum, name) => sum + sampled(name), 0);
  const share = name => tokens && sampled(name) ? ` (${(100 * sampled(name) / tokens).toFixed(1)} % of tokens)` : '';
  place.replaceChildren(...rows.map(row => h('div', {class: 'fate-row'},
    h('div', {class: 'who'}, h('span', {}, row.env), h('span', {class: 'dim'}, `${row.published.toLocaleString('en-US')} rollouts`)),
    h('div', {class: 'share'}, there.filter(name => row.counts[name]).map(name =>
      h('span', {class: slug(name), title: `${name}: ${row.counts[name]}`, style: {flex: row.counts[name]}}))))),
    h('div', {class: 'legend'}, there.map(name => h('span', {}, h('i', {class: `fate-mark ${slug(name)}`}), `${name} `,
      h('b', {}, rows.reduce((sum, row) => sum + row.counts[name], 0).toLocaleString('en-US')), share(name)))));
}
