package report

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"jbofd/internal/sim"
)

// palette holds the colours of the policies. They are those of Okabe and Ito, alternately dark and light, so that they
// can be distinguished with colour blindness and in greyscale.
var palette = []color.Color{
	color.RGBA{0x99, 0x99, 0x99, 0xff}, color.RGBA{0x00, 0x72, 0xb2, 0xff}, color.RGBA{0xe6, 0x9f, 0x00, 0xff},
	color.RGBA{0x00, 0x9e, 0x73, 0xff},
	color.RGBA{0xcc, 0x79, 0xa7, 0xff}, color.RGBA{0xd5, 0x5e, 0x00, 0xff}, color.RGBA{0x56, 0xb4, 0xe9, 0xff},
	color.RGBA{0xf0, 0xe4, 0x42, 0xff},
}

func colour(i int) color.Color { return palette[i%len(palette)] }

// tenantColour returns the colour of the i-th tenant: first those of the palette, then hues a golden angle apart, which
// do not repeat.
func tenantColour(i int) color.Color {
	if i < len(palette)-1 {
		return palette[i+1] // the first colour, grey, is for the background
	}
	const goldenAngle = 137.508
	hue := math.Mod(float64(i)*goldenAngle, 360) / 60
	light := [2]float64{0.75, 0.5}[i%2]
	x := light * (1 - math.Abs(math.Mod(hue, 2)-1))
	rgb := [6][3]float64{{light, x, 0}, {x, light, 0}, {0, light, x}, {0, x, light}, {x, 0, light},
		{light, 0, x}}[int(hue)]
	return color.RGBA{uint8(255 * rgb[0]), uint8(255 * rgb[1]), uint8(255 * rgb[2]), 0xff}
}

// fonts replaces the only font that gonum's plots name, which few machines have, by fonts that every viewer has.
var fonts = strings.NewReplacer("font-family:Liberation Serif;",
	"font-family:Liberation Sans,Arial,Helvetica,sans-serif;",
	"font-family:Liberation Sans;", "font-family:Liberation Sans,Arial,Helvetica,sans-serif;")

// bar is one phase of a scenario under all policies.
type bar struct {
	name   string
	phases []*sim.PhaseResult // by policy
}

// chart is a row of the workload matrix.
type chart struct {
	row      string
	policies []string
	bars     []bar
}

// charts groups results by row. Scenarios with many phases are left out: their time series show them.
func charts(results []*sim.Result) (out []chart) {
	const most = 4
	for _, r := range results {
		at := slices.IndexFunc(out, func(c chart) bool { return c.row == r.Row })
		if at < 0 {
			at = len(out)
			out = append(out, chart{row: r.Row})
		}
		c := &out[at]
		policy := slices.Index(c.policies, r.Policy)
		if policy < 0 {
			policy = len(c.policies)
			c.policies = append(c.policies, r.Policy)
		}
		if len(r.Phases) > most {
			continue
		}
		for i := range r.Phases {
			name := r.Scenario
			if len(r.Phases) > 1 {
				name += ": " + r.Phases[i].Name
			}
			b := slices.IndexFunc(c.bars, func(b bar) bool { return b.name == name })
			if b < 0 {
				b = len(c.bars)
				c.bars = append(c.bars, bar{name: name})
			}
			for len(c.bars[b].phases) <= policy {
				c.bars[b].phases = append(c.bars[b].phases, nil)
			}
			c.bars[b].phases[policy] = &r.Phases[i]
		}
	}
	return slices.DeleteFunc(out, func(c chart) bool { return len(c.bars) == 0 })
}

// ticks places four to nine ticks at round numbers.
type ticks struct{}

// Ticks implements plot.Ticker.
func (ticks) Ticks(least, most float64) (out []plot.Tick) {
	const many = 8
	step := math.Pow(10, math.Floor(math.Log10((most-least)/many)))
	for _, f := range []float64{1, 2, 5, 10} {
		if (most-least)/(step*f) <= many {
			step *= f
			break
		}
	}
	for i := math.Ceil(least / step); i*step <= most; i++ {
		out = append(out, plot.Tick{Value: i * step, Label: strconv.FormatFloat(i*step, 'g', 4, 64)})
	}
	return out
}

// Sizes of the plots on paper.
const (
	barWidth    = vg.Length(7)
	labelHeight = vg.Length(150)
	plotHeight  = vg.Length(190)
)

// newPlot returns an empty bar plot of the chart and its width.
func (c *chart) newPlot(title, y string) (p *plot.Plot, width vg.Length) {
	p = plot.New()
	p.Title.Text = title
	p.Y.Label.Text = y
	p.Legend.Top = true
	p.Legend.ThumbnailWidth = 10
	names := make([]string, len(c.bars))
	for i, b := range c.bars {
		names[i] = b.name
	}
	p.NominalX(names...)
	p.X.Tick.Label.Rotation = math.Pi / 5
	p.X.Tick.Label.XAlign, p.X.Tick.Label.YAlign = text.XRight, text.YCenter
	p.X.Min, p.X.Max = -0.6, float64(len(c.bars))-0.4
	grid := plotter.NewGrid()
	grid.Vertical.Width = 0
	grid.Horizontal.Color = color.Gray{0xdd}
	p.Add(grid)
	slot := barWidth*vg.Length(len(c.policies)) + 16
	return p, max(420, slot*vg.Length(len(c.bars))+200)
}

// at returns the horizontal position of policy i of n for a scenario.
func (c *chart) at(bar, policy int) float64 {
	return float64(bar) + (float64(policy)-float64(len(c.policies)-1)/2)*0.8/float64(len(c.policies))
}

// plotFUtil draws f-Util: a bar up to the mean, and a line from the minimum to the maximum.
func (c *chart) plotFUtil(file string) error {
	p, width := c.newPlot("f-Util: "+c.row+" (bar: mean, line: worst to best tenant; 1 is ideal)", "f-Util")
	ideal := plotter.NewFunction(func(float64) float64 { return 1 })
	ideal.Dashes = []vg.Length{2, 2}
	p.Add(ideal)
	for i, policy := range c.policies {
		var means plotter.XYs
		var spread errorBars
		for b := range c.bars {
			if i >= len(c.bars[b].phases) || c.bars[b].phases[i] == nil {
				continue
			}
			ph := c.bars[b].phases[i]
			x := c.at(b, i)
			means = append(means, plotter.XY{X: x, Y: ph.FUtilMean})
			spread.XYs = append(spread.XYs, plotter.XY{X: x, Y: ph.FUtilMean})
			spread.YErrors = append(spread.YErrors, struct{ Low, High float64 }{ph.FUtilMean - ph.FUtilMin,
				ph.FUtilMax - ph.FUtilMean})
		}
		if len(means) == 0 {
			continue
		}
		bars := &columnsAt{xys: means, half: 0.36 / float64(len(c.policies)), fill: colour(i)}
		whiskers, err := plotter.NewYErrorBars(spread)
		if err != nil {
			return err
		}
		whiskers.CapWidth = 3
		p.Add(bars, whiskers)
		p.Legend.Add(policy, bars)
	}
	p.Y.Min = 0
	p.Y.Tick.Marker = ticks{}
	// Room for the legend.
	p.Y.Max = min(max(p.Y.Max, 1.2), 4) * 1.25
	return save(file, width, plotHeight+labelHeight, p)
}

// errorBars combines points with their error ranges.
type errorBars struct {
	plotter.XYs
	plotter.YErrors
}

// columnsAt draws columns at coordinates of the plot, so that error bars align with them; plotter.BarChart takes a
// length on paper instead. Columns begin at the lower end of the plot, so that a logarithmic scale is possible.
type columnsAt struct {
	xys  plotter.XYs
	half float64
	fill color.Color
}

// Plot implements plot.Plotter.
func (b *columnsAt) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	for _, v := range b.xys {
		pts := []vg.Point{{X: x(v.X - b.half), Y: y(p.Y.Min)}, {X: x(v.X - b.half), Y: y(v.Y)},
			{X: x(v.X + b.half), Y: y(v.Y)}, {X: x(v.X + b.half), Y: y(p.Y.Min)}}
		c.FillPolygon(b.fill, c.ClipPolygonXY(pts))
	}
}

// DataRange implements plot.DataRanger.
func (b *columnsAt) DataRange() (xmin, xmax, ymin, ymax float64) {
	return plotter.XYRange(b.xys)
}

// Thumbnail implements plot.Thumbnailer.
func (b *columnsAt) Thumbnail(c *draw.Canvas) {
	c.FillPolygon(b.fill, []vg.Point{{X: c.Min.X, Y: c.Min.Y}, {X: c.Min.X, Y: c.Max.Y}, {X: c.Max.X, Y: c.Max.Y},
		{X: c.Max.X, Y: c.Min.Y}})
}

// plotTail draws p99.9 latencies on a logarithmic scale.
func (c *chart) plotTail(file string) error {
	p, width := c.newPlot("Latency, p99.9 of all I/Os: "+c.row, "µs (logarithmic)")
	least, most := math.Inf(1), 0.0
	for _, b := range c.bars {
		for _, ph := range b.phases {
			if ph != nil && ph.Latency.P999NS > 0 {
				least, most = min(least, float64(ph.Latency.P999NS)/1e3), max(most, float64(ph.Latency.P999NS)/1e3)
			}
		}
	}
	if most == 0 {
		return nil
	}
	for i, policy := range c.policies {
		bars := &columnsAt{half: 0.36 / float64(len(c.policies)), fill: colour(i)}
		for b := range c.bars {
			if i < len(c.bars[b].phases) && c.bars[b].phases[i] != nil && c.bars[b].phases[i].Latency.P999NS > 0 {
				bars.xys = append(bars.xys,
					plotter.XY{X: c.at(b, i), Y: float64(c.bars[b].phases[i].Latency.P999NS) / 1e3})
			}
		}
		if len(bars.xys) > 0 {
			p.Add(bars)
			p.Legend.Add(policy, bars)
		}
	}
	p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	p.Y.Min, p.Y.Max = math.Pow(10, math.Floor(math.Log10(least*0.9))), math.Pow(10, math.Ceil(math.Log10(most*3)))
	return save(file, width, plotHeight+labelHeight, p)
}

// plotCDF draws the latency distributions of one scenario under all policies.
func plotCDF(file string, results []*sim.Result) error {
	p := plot.New()
	p.Title.Text = fmt.Sprintf("Latency of %s/%s", results[0].Row, results[0].Scenario)
	p.X.Label.Text, p.Y.Label.Text = "µs (logarithmic)", "part of all I/Os"
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	p.Legend.YOffs = 10 // below the curves, on the right
	p.Add(plotter.NewGrid())
	for i, r := range results {
		var pts plotter.XYs
		for _, q := range r.Phases[0].CDF {
			pts = append(pts, plotter.XY{X: max(float64(q.NS)/1e3, 1), Y: q.Fraction})
		}
		if len(pts) == 0 {
			continue
		}
		l, err := plotter.NewLine(pts)
		if err != nil {
			return err
		}
		l.Color, l.Width = colour(i), 1.5
		p.Add(l)
		p.Legend.Add(r.Policy, l)
	}
	p.Y.Min, p.Y.Max = 0, 1
	return save(file, 480, 320, p)
}

// plotSeries draws the time series of a scenario, one plot below the other for each policy.
func plotSeries(file string, results []*sim.Result) error {
	var plots [][]*plot.Plot
	for _, r := range results {
		p := plot.New()
		p.Title.Text = fmt.Sprintf("%s/%s, %s: part of the drive by tenant", r.Row, r.Scenario, r.Policy)
		p.X.Label.Text, p.Y.Label.Text = "s", "of a drive of its own"
		p.Legend.Top = true
		for i, usage := range r.Series.Tenants {
			// Average over five bins, because single bins are noisy.
			const smooth = 5
			var pts plotter.XYs
			for b := 0; b+smooth <= len(usage); b += smooth {
				sum := 0.0
				for _, u := range usage[b : b+smooth] {
					sum += u / smooth
				}
				pts = append(pts, plotter.XY{X: (float64(b) + smooth/2.0) * float64(r.Series.BinNS) / 1e9, Y: sum})
			}
			l, err := plotter.NewLine(pts)
			if err != nil {
				return err
			}
			l.Color, l.Width = tenantColour(i), 1
			p.Legend.Add(r.Series.Names[i], l)
			p.Add(l)
		}
		p.X.Tick.Marker, p.Y.Tick.Marker = ticks{}, ticks{}
		p.Y.Min = 0
		p.Y.Max *= 1.4 // room for the legend
		plots = append(plots, []*plot.Plot{p})
	}
	return saveAll(file, 640, 180, plots)
}

// plotWriteCost draws the policies' estimates of the write cost.
func plotWriteCost(file string, results []*sim.Result) error {
	p := plot.New()
	p.Title.Text = fmt.Sprintf("Write cost in %s/%s", results[0].Row, results[0].Scenario)
	p.X.Label.Text, p.Y.Label.Text = "s", "cost of a written byte, in read bytes"
	p.Legend.Top = true
	drawn := false
	for i, r := range results {
		if slices.Max(r.Series.WriteCost) == 0 {
			continue // the policy estimates no write cost
		}
		pts := make(plotter.XYs, len(r.Series.WriteCost))
		for b, v := range r.Series.WriteCost {
			pts[b] = plotter.XY{X: float64(int64(b+1)*r.Series.BinNS) / 1e9, Y: v}
		}
		l, err := plotter.NewLine(pts)
		if err != nil {
			return err
		}
		l.Color, l.Width = colour(i), 1.5
		p.Add(l)
		p.Legend.Add(r.Policy, l)
		drawn = true
	}
	if !drawn {
		return nil
	}
	p.X.Tick.Marker, p.Y.Tick.Marker = ticks{}, ticks{}
	p.Y.Min = 0
	p.Y.Max *= 1.2
	return save(file, 640, 240, p)
}

func save(file string, width, height vg.Length, p *plot.Plot) error {
	return saveAll(file, width, height, [][]*plot.Plot{{p}})
}

// saveAll writes plots one below the other to a file. The file name extension decides the format.
func saveAll(file string, width, height vg.Length, plots [][]*plot.Plot) error {
	c, err := draw.NewFormattedCanvas(width, height*vg.Length(len(plots)), format(file))
	if err != nil {
		return err
	}
	tiles := draw.Tiles{Rows: len(plots), Cols: 1, PadTop: 6, PadBottom: 6, PadLeft: 6, PadRight: 12, PadY: 8}
	for i, canvases := range plot.Align(plots, tiles, draw.New(c)) {
		plots[i][0].Draw(canvases[0])
	}
	var b bytes.Buffer
	if _, err := c.WriteTo(&b); err != nil {
		return err
	}
	return os.WriteFile(file, []byte(fonts.Replace(b.String())), 0o644)
}
