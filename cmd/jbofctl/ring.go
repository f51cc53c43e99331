package main

import (
	"bytes"
	"fmt"
	"html"
	"math"

	"jbofd/internal/admin"
)

// The drawing of a ring, in pixels. Ranges lie around the centre as positions do, the first one at the top, clockwise.
// Each range has a ring for each member of its chain, the ChainHead outermost.
const (
	ringCentre = 320
	ringOuter  = 300
	ringWidth  = 44
	ringLegend = 2*ringCentre + 20
	// ringSectors is how many ranges are drawn at most. Of more, every second, fourth, eighth… is.
	ringSectors = 1024
)

// ringOpacity says how a member is drawn: the less it has of its range, the paler.
var ringOpacity = map[string]float64{"serving": 1, "leaving": 0.7, "last copy": 0.5, "filling": 0.35, "waiting": 0.15}

// drawRing draws who has which range, as an SVG document.
func drawRing(a *admin.Cluster, chains []admin.Chain) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" `+
		`font-size="14">`+"\n", ringLegend+260, max(2*ringCentre, 120+24*len(a.Nodes)))
	fmt.Fprintln(&b, `<rect width="100%" height="100%" fill="#ffffff"/>`)
	colors := map[string]string{}
	for i, n := range a.Nodes {
		// The golden angle keeps the colors of any number of nodes apart.
		colors[n.Name] = fmt.Sprintf("hsl(%.0f,60%%,%d%%)", math.Mod(float64(i)*137.508, 360), 45+i%3*8)
	}
	step := 1
	for len(chains)/step > ringSectors {
		step *= 2
	}
	for r := 0; r < len(chains); r += step {
		from := 2 * math.Pi * float64(r) / float64(len(chains))
		to := 2 * math.Pi * float64(r+step) / float64(len(chains))
		for i, m := range chains[r].Members {
			outer := float64(ringOuter - i*ringWidth)
			fmt.Fprintf(&b, `<path d="%s" fill="%s" fill-opacity="%g" stroke="#ffffff" stroke-width="0.5">`+
				`<title>range %d: %s, %s</title></path>`+"\n", sector(from, to, outer, outer-ringWidth+2),
				colors[m.Node], ringOpacity[m.State], chains[r].Range, html.EscapeString(m.Node),
				html.EscapeString(m.State))
		}
	}
	text := func(x, y int, format string, args ...any) {
		fmt.Fprintf(&b, `<text x="%d" y="%d">%s</text>`+"\n", x, y, html.EscapeString(fmt.Sprintf(format, args...)))
	}
	text(ringLegend, 40, "%s, epoch %d", a.Name, a.Epoch)
	text(ringLegend, 62, "%d ranges, %d replicas", a.Ranges.Total, a.Replicas)
	for i, n := range a.Nodes {
		y := 96 + 24*i
		fmt.Fprintf(&b, `<rect x="%d" y="%d" width="14" height="14" fill="%s"/>`+"\n", ringLegend, y-12, colors[n.Name])
		text(ringLegend+22, y, "%s (%s): %d replicas", n.Name, n.State, n.Replicas)
	}
	fmt.Fprintln(&b, "</svg>")
	return b.Bytes()
}

// sector is the path of a part of a ring between two angles, which count clockwise from the top.
func sector(from, to, outer, inner float64) string {
	to = min(to, from+2*math.Pi-1e-6) // an arc of a whole circle would be none
	large := 0
	if to-from > math.Pi {
		large = 1
	}
	at := func(angle, radius float64) (x, y float64) {
		return ringCentre + radius*math.Sin(angle), ringCentre - radius*math.Cos(angle)
	}
	x0, y0 := at(from, outer)
	x1, y1 := at(to, outer)
	x2, y2 := at(to, inner)
	x3, y3 := at(from, inner)
	return fmt.Sprintf("M%.2f %.2fA%g %g 0 %d 1 %.2f %.2fL%.2f %.2fA%g %g 0 %d 0 %.2f %.2fZ", x0, y0, outer, outer,
		large, x1, y1, x2, y2, inner, inner, large, x3, y3)
}
