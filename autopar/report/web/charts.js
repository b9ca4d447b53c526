// The parts of Apache ECharts that the page uses, and what all its charts share.
import { CustomChart, LineChart } from 'echarts/charts';
import { DataZoomComponent, GridComponent, MarkLineComponent, TooltipComponent } from 'echarts/components';
import * as echarts from 'echarts/core';
import { CanvasRenderer } from 'echarts/renderers';
import { colour } from './dom.js';
import { seconds } from './format.js';

echarts.use([CanvasRenderer, CustomChart, DataZoomComponent, GridComponent, LineChart, MarkLineComponent, TooltipComponent]);

export const clip = echarts.graphic.clipRectByRect;
export const charts = [];

// A chart in `element`, whose `option` is made anew where the colours of the system change.
export function draw(element, option) {
  const chart = echarts.init(element);
  const entry = { chart, draw: () => chart.setOption(option(), { notMerge: false }) };
  entry.draw();
  charts.push(entry);
  return chart;
}

addEventListener('resize', () => charts.forEach(({ chart }) => chart.resize()));
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => charts.forEach((entry) => entry.draw()));

export const narrow = () => innerWidth < 600;

export const timeAxis = (end) => ({
  type: 'value', min: 0, max: end,
  axisLabel: { color: colour('soft'), hideOverlap: true, showMaxLabel: false, formatter: (value) => (value ? seconds(value) : '0') },
  axisLine: { show: true, lineStyle: { color: colour('line') } }, splitLine: { lineStyle: { color: colour('line') } },
});

export const tooltip = () => ({
  confine: true, backgroundColor: colour('card'), borderColor: colour('line'), textStyle: { color: colour('text') }, transitionDuration: 0,
});

export const slider = () => ({
  type: 'slider', height: 22, bottom: 6, borderColor: colour('line'), textStyle: { color: colour('soft') },
  fillerColor: `rgba(${colour('shade')}, 0.2)`, handleStyle: { color: colour('accent') }, brushSelect: false, showDetail: false,
  dataBackground: { lineStyle: { opacity: 0 }, areaStyle: { opacity: 0 } },
});

// Zoom and movement of a chart, as shares of the whole from 0 to 100.
export class Window {
  constructor(chart) { this.chart = chart; }

  get range() {
    const { start, end } = this.chart.getOption().dataZoom[0];
    return [start, end];
  }

  set range([start, end]) {
    const width = Math.min(100, Math.max(end - start, 1e-3));
    const first = Math.min(Math.max(0, start), 100 - width);
    this.chart.dispatchAction({ type: 'dataZoom', start: first, end: first + width });
  }

  // Show what another window shows.
  follow([start, end]) {
    if (this.range[0] !== start || this.range[1] !== end) this.chart.dispatchAction({ type: 'dataZoom', start, end });
  }

  zoom(factor) {
    const [start, end] = this.range;
    const middle = (start + end) / 2;
    this.range = [middle - ((middle - start) * factor), middle + ((end - middle) * factor)];
  }

  move(share) {
    const [start, end] = this.range;
    this.range = [start + share * (end - start), end + share * (end - start)];
  }

  whole() { this.range = [0, 100]; }

  // Make a part of the whole visible.
  show(from, to) {
    const [start, end] = this.range;
    if (from >= start && to <= end) return;
    const width = Math.max(end - start, to - from);
    this.range = [(from + to) / 2 - width / 2, (from + to) / 2 + width / 2];
  }
}
