package readme

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

// TestLinesOfDocumentsEndAt120Columns; rows of tables and code cannot be broken.
func TestLinesOfDocumentsEndAt120Columns(t *testing.T) {
	names := []string{filepath.Join(root, "README.md"), filepath.Join(root, "CHANGELOG.md"),
		filepath.Join(root, "CONTRIBUTING.md")}
	for _, pattern := range []string{"docs/*.md", "docs/decisions/*.md", "test/bench/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(found), err)
		}
		names = append(names, found...)
	}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		code := false
		for i, line := range strings.Split(string(text), "\n") {
			if strings.HasPrefix(line, "```") {
				code = !code
			}
			if n := utf8.RuneCountInString(line); n > 120 && !code && !strings.HasPrefix(line, "|") {
				t.Errorf("%s:%d has %d columns", name, i+1, n)
			}
		}
	}
}

// TestTheGlossaryHasTheTermsThatTheDocumentsUse, and the documents that say what it is for link to it.
func TestTheGlossaryHasTheTermsThatTheDocumentsUse(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs", "glossary.md"))
	if err != nil {
		t.Fatal(err)
	}
	terms := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^\* \*\*(.+?)\*\*: `).FindAllStringSubmatch(string(text), -1) {
		for term := range strings.SplitSeq(m[1], ", ") {
			if terms[term] {
				t.Errorf("%q is explained twice", term)
			}
			terms[term] = true
		}
	}
	for _, term := range strings.Split("node, drive, SSD, tenant, namespace, subsystem, partition, swap area, "+
		"association, controller, connection, "+
		"queue pair, turn, machine, executor, fence, epoch, stale, write stall, victim, obsolete, pending free, "+
		"manifest, indeterminate, source, lender, "+
		"swapped key, credit, cap, weight, share, policy, pipeline, write cost, congestion state, device time, label, "+
		"extent, blank, foreign, ready, "+
		"left out, chunk, segment, key log, value log, checkpoint, compaction, scrub, recovery, reload, dry run, "+
		"f-Util, lab, mailbox, kick, need data, "+
		"composed operation, kv-background, retiring, missing", ", ") {
		if !terms[term] {
			t.Errorf("docs/glossary.md does not explain %q", term)
		}
	}
	for page, link := range map[string]string{"README.md": "(docs/glossary.md)",
		"docs/architecture.md": "(glossary.md)", "docs/operations.md": "(glossary.md)"} {
		text, err := os.ReadFile(filepath.Join(root, page))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), link) {
			t.Errorf("%s has no link to the glossary", page)
		}
	}
}

// TestLinksOfDocumentsLeadSomewhere: to files, and to headings in them.
func TestLinksOfDocumentsLeadSomewhere(t *testing.T) {
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range append(pages, filepath.Join(root, "README.md")) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`\]\(([^)#:]*)(?:#([^)]*))?\)`).FindAllStringSubmatch(string(text), -1) {
			file := page
			if m[1] != "" {
				file = filepath.Join(filepath.Dir(page), m[1])
			}
			to, err := os.ReadFile(file)
			if err != nil {
				t.Errorf("%s: %v", page, err)
				continue
			}
			if m[2] != "" && !anchors(string(to))[m[2]] {
				t.Errorf("%s: %s has no heading %q", page, file, m[2])
			}
		}
	}
}

// anchors returns the names of a page's headings in links, as GitHub makes them.
func anchors(text string) map[string]bool {
	all := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
		name := strings.ToLower(regexp.MustCompile(`[^\w\- ]`).ReplaceAllString(m[1], ""))
		all[strings.ReplaceAll(name, " ", "-")] = true
	}
	return all
}
