package link

import (
	"strings"
	"testing"
)

// TestNodesComeAndGo adds a node to the others while they run, gives it another address, and removes it.
func TestNodesComeAndGo(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, "a", "b", "c", "elsewhere")
	two, three := network{"a": n["a"], "b": n["b"]}, network{"a": n["a"], "b": n["b"], "c": n["c"]}
	a, b, c := two.start(t, "a"), two.start(t, "b"), three.start(t, "c")
	arrives(t, a, n["b"], b, 1)
	c.says(t, n["a"], "node \\\"c\\\" is not one of the others")
	if got := c.Refusals(); len(got) != 1 || got["a"] != `node "c" is not one of the others in the configuration of a` {
		t.Errorf("a refuses c: %q", got)
	}
	for _, e := range []*end{a, b} {
		if err := e.SetNodes(three); err != nil {
			t.Fatal(err)
		}
	}
	arrives(t, c, n["a"], a, 2)
	if got := c.Refusals(); len(got) > 0 {
		t.Errorf("nobody refuses c any more: %q", got)
	}
	arrives(t, a, n["c"], c, 3)
	arrives(t, a, n["b"], b, 4)

	moved := network{"a": n["a"], "b": n["b"], "c": n["elsewhere"]}
	if err := a.SetNodes(moved); err != nil {
		t.Fatal(err)
	}
	c.says(t, n["a"], "node c comes from ")
	c.Close()
	c = moved.start(t, "c")
	arrives(t, c, n["a"], a, 5)
	arrives(t, a, n["elsewhere"], c, 6)

	if err := a.SetNodes(two); err != nil {
		t.Fatal(err)
	}
	for len(a.got) > 0 {
		<-a.got
	}
	c.says(t, n["a"], "node \\\"c\\\" is not one of the others")
	a.Send(n["elsewhere"], report("a", 7))
	if len(a.got) > 0 {
		t.Error("a node that was removed is heard")
	}
	arrives(t, a, n["b"], b, 8)
	a.Close()
	if err := a.SetNodes(three); err != nil {
		t.Errorf("after Close: %v", err)
	}
}

// TestNodesThatCannotBeChangeNothing sets nodes that are refused.
func TestNodesThatCannotBeChangeNothing(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, "a", "b", "c")
	a, b := n.start(t, "a"), n.start(t, "b")
	for _, c := range []struct {
		nodes network
		want  string
	}{
		{network{"b": n["b"]}, "cannot become \"\""},
		{network{"a": n["c"], "b": n["b"]}, "the address of a, this node, is "},
		{network{"a": n["a"], "b": n["a"]}, "belongs to two nodes"},
		{network{"a": n["a"], "b": "h"}, "missing port"},
	} {
		if err := a.SetNodes(c.nodes); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %s", c.nodes, err, c.want)
		}
	}
	arrives(t, a, n["b"], b, 1)
}
