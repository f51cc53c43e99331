package lint

import (
	"go/ast"
	"slices"
	"strings"
)

func isPure(dir string) bool { return slices.Contains(pure, dir) }

// checkPure reports impure imports of pure packages.
func checkPure(t *Tree, report Reporter) {
	t.files(false, isPure, func(p *Package, f *File) {
		for _, i := range f.AST.Imports {
			ip := importPath(i)
			if slices.Contains(impureExceptions, ip) {
				continue
			}
			for _, bad := range impure {
				if under(ip, bad) {
					report(i.Pos(), "%s is a pure package and must not import %q: take the value as an argument (now, "+
						"a seed, bytes), or declare an interface here that a transport or device implements", p.Dir, ip)
				}
			}
		}
	})
}

// checkTime reports uses of package time in pure packages other than Duration and its units.
func checkTime(t *Tree, report Reporter) {
	allowed := []string{"Duration", "Nanosecond", "Microsecond", "Millisecond", "Second", "Minute", "Hour"}
	t.files(false, isPure, func(p *Package, f *File) {
		name := ""
		for _, i := range f.AST.Imports {
			if importPath(i) != "time" {
				continue
			}
			name = "time"
			if i.Name != nil {
				name = i.Name.Name
			}
			if name == "." {
				report(i.Pos(), "%s is a pure package and must not dot-import time: import it by name and use "+
					"time.Duration only", p.Dir)
			}
		}
		if name == "" || name == "." || name == "_" {
			return
		}
		ast.Inspect(f.AST, func(n ast.Node) bool {
			s, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			if x, ok := s.X.(*ast.Ident); ok && x.Name == name && !slices.Contains(allowed, s.Sel.Name) {
				report(s.Pos(), "%s is a pure package and must not use time.%s: the driver passes now as int64 "+
					"nanoseconds; of time only Duration is allowed", p.Dir, s.Sel.Name)
			}
			return true
		})
	})
}

// checkGoroutine reports goroutines and channels in pure packages.
func checkGoroutine(t *Tree, report Reporter) {
	t.files(false, isPure, func(p *Package, f *File) {
		ast.Inspect(f.AST, func(n ast.Node) bool {
			switch n.(type) {
			case *ast.GoStmt:
				report(n.Pos(), "%s is a pure package and must not start a goroutine: return an action and let the "+
					"driver run it", p.Dir)
			case *ast.ChanType, *ast.SelectStmt:
				report(n.Pos(), "%s is a pure package and must not use channels: append to the caller's slice instead",
					p.Dir)
			}
			return true
		})
	})
}

// checkCgo reports import "C" outside of cgoPackages or without the build tag.
func checkCgo(t *Tree, report Reporter) {
	t.files(true, everywhere, func(p *Package, f *File) {
		for _, i := range f.AST.Imports {
			if importPath(i) != "C" {
				continue
			}
			tag, ok := cgoPackages[p.Dir]
			if !ok {
				report(i.Pos(), `import "C" is allowed in internal/nvmeof/rdma/verbs and internal/ssd/spdk only: `+
					"put the call there and import that package")
			} else if !strings.Contains(f.buildLine(), tag) {
				report(i.Pos(), `a file with import "C" in %s needs "//go:build %s", and an untagged twin that `+
					`returns an error "built without %s"`, p.Dir, tag, tag)
			}
		}
	})
}

// checkUnsafe reports imports of unsafe in files that are not named for it.
func checkUnsafe(t *Tree, report Reporter) {
	t.files(true, everywhere, func(p *Package, f *File) {
		for _, i := range f.AST.Imports {
			if importPath(i) != "unsafe" {
				continue
			}
			stem := strings.TrimSuffix(strings.TrimSuffix(f.Path, ".go"), "_test")
			if !strings.HasSuffix(stem, "_unsafe") {
				report(i.Pos(), "unsafe may be imported only by files named *_unsafe.go: move the code that needs it "+
					"to %s_unsafe.go and keep that file small", stem)
			}
		}
	})
}

// checkDirection reports imports within the module that the table directions does not allow.
func checkDirection(t *Tree, report Reporter) {
	t.files(false, everywhere, func(p *Package, f *File) {
		if inPeerModule(p.Dir) {
			return
		}
		r := rowOf(p.Dir)
		for _, i := range f.AST.Imports {
			to, ok := strings.CutPrefix(importPath(i), module+"/")
			if !ok || r == nil || slices.Contains(base, to) {
				continue
			}
			if under(to, testEnvironment) && !under(p.Dir, testEnvironment) && p.Dir != simulator {
				report(i.Pos(), "%s must not import %s: the simulated environment is for tests and %s only", p.Dir, to,
					simulator)
				continue
			}
			if !slices.ContainsFunc(r.may, func(pat string) bool { return matches(to, pat) }) {
				may := strings.Join(append(slices.Clone(r.may), base...), ", ")
				report(i.Pos(), "%s must not import %s (allowed: %s): %s. To change what is allowed, edit the "+
					"package's row in internal/lint/table.go and give the reason in the commit message", p.Dir, to, may,
					r.remedy)
			}
		}
	})
	for _, p := range t.Packages {
		if r := rowOf(p.Dir); r == nil && (under(p.Dir, "internal") || under(p.Dir, "client") || under(p.Dir, "cmd")) {
			report(p.Files[0].Path, "package %s has no row in internal/lint/table.go: add one that lists the packages "+
				"it may import", p.Dir)
		}
	}
}

// rowOf returns the row with the longest dir that contains the package, or nil.
func rowOf(dir string) (best *row) {
	for i := range directions {
		r := &directions[i]
		if under(dir, r.dir) && (best == nil || len(r.dir) > len(best.dir)) {
			best = r
		}
	}
	return best
}

func matches(to, pattern string) bool {
	if root, ok := strings.CutSuffix(pattern, "/..."); ok {
		return under(to, root)
	}
	return to == pattern
}

func inPeerModule(dir string) bool { return under(dir, peerModule) }

// checkDependency reports imports of modules outside the dependencies listed in table.go, and requirements of the root
// go.mod outside them. Test dependencies may be imported by tests only, peers only in their own module, which is not
// checked otherwise. Indirect requirements are free, except for peers.
func checkDependency(t *Tree, report Reporter) {
	in := func(p string, list []string) bool {
		return slices.ContainsFunc(list, func(m string) bool { return under(p, m) })
	}
	t.files(true, everywhere, func(p *Package, f *File) {
		if inPeerModule(p.Dir) {
			return
		}
		tests := f.Test || slices.ContainsFunc(testTools, func(dir string) bool { return under(p.Dir, dir) })
		for _, i := range f.AST.Imports {
			ip := importPath(i)
			first, _, _ := strings.Cut(ip, "/")
			switch {
			case !strings.Contains(first, "."), in(ip, dependencies), tests && in(ip, testDependencies):
			case in(ip, peers):
				report(i.Pos(), "%s is a peer that jbofd is compared with: import it in the module %s only", ip,
					peerModule)
			case in(ip, testDependencies):
				report(i.Pos(), "%s may be imported by tests only", ip)
			default:
				report(i.Pos(), "%s is not among the dependencies in internal/lint/table.go: use the standard library "+
					"or a listed dependency, or add it there and give the reason in the commit message", ip)
			}
		}
	})
	for line := range strings.Lines(string(t.Modules["."])) {
		fields := strings.Fields(strings.TrimPrefix(strings.TrimSpace(line), "require "))
		if len(fields) < 2 || !strings.HasPrefix(fields[1], "v") {
			continue
		}
		direct := !strings.Contains(line, "// indirect")
		switch m := fields[0]; {
		case in(m, peers):
			report("go.mod", "%s is a peer that jbofd is compared with: it belongs in the go.mod of %s", m, peerModule)
		case direct && !in(m, dependencies) && !in(m, testDependencies):
			report("go.mod", "%s is not among the dependencies in internal/lint/table.go: add it there and give the "+
				"reason in the commit message, or remove the requirement", m)
		}
	}
}
