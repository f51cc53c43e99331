package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	"jbofd/internal/config"
)

// print writes an answer as --output asks; table writes the rows for people.
func (x *cli) print(c *cobra.Command, answer any, table func(w *tabwriter.Writer)) error {
	if x.output == "table" {
		t := tabwriter.NewWriter(c.OutOrStdout(), 0, 0, 2, ' ', 0)
		table(t)
		return t.Flush()
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(answer); err != nil {
		return err
	}
	text := b.Bytes()
	if x.output == "yaml" {
		var err error
		if text, err = yaml.JSONToYAML(text); err != nil {
			return err
		}
	}
	_, err := c.OutOrStdout().Write(text)
	return err
}

// row writes one line of a table; empty cells become a dash.
func row(t *tabwriter.Writer, cells ...any) {
	for i, cell := range cells {
		s := fmt.Sprint(cell)
		if s == "" {
			s = "-"
		}
		if i > 0 {
			s = "\t" + s
		}
		fmt.Fprint(t, s)
	}
	fmt.Fprintln(t)
}

// size writes bytes as configurations do.
func size(n int64) string { return config.Bytes(n).String() }

// about writes bytes of which people need no more than the KiB, rounded up.
func about(n int64) string { return size((n + 1023) &^ 1023) }

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func join(s []string) string { return strings.Join(s, ",") }
