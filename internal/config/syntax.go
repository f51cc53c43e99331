package config

import (
	"bytes"
	"fmt"
	"unicode/utf8"

	"github.com/goccy/go-yaml/token"
)

// Bounds of a file's syntax. The YAML parser recurses for each level of nesting and compares each key of a mapping
// with those before it: without bounds a file of 200 KB takes minutes and gigabytes. The scanner is linear, so its
// tokens are checked before the parser sees them.
const (
	// maxFileBytes bounds a file. A namespace takes about 100 bytes and a host NQN 70.
	maxFileBytes = 8 << 20
	// maxNesting bounds the levels of lists and mappings within each other. The schema has seven.
	maxNesting = 32
	// maxKeys bounds the keys of one mapping. The schema has at most sixteen.
	maxKeys = 256
)

// plainText returns the text of a file as the YAML scanner wants it, without a byte order mark.
//
// Errors: one that says what the file is instead of UTF-8 text, or that it is too large.
func plainText(data []byte) ([]byte, error) {
	switch {
	case len(data) > maxFileBytes:
		return nil, fmt.Errorf("the file has more than %s; allowed: at most that", Bytes(maxFileBytes))
	case bytes.HasPrefix(data, []byte{0xff, 0xfe}), bytes.HasPrefix(data, []byte{0xfe, 0xff}):
		return nil, fmt.Errorf("the file is UTF-16; allowed: UTF-8")
	}
	data = bytes.TrimPrefix(data, []byte("\uFEFF"))
	if !utf8.Valid(data) {
		return nil, fmt.Errorf("the file is not UTF-8; allowed: UTF-8")
	}
	return data, nil
}

// tooComplex returns the first token that exceeds maxNesting or maxKeys, and what it exceeds; nil if none does.
func tooComplex(tokens token.Tokens) (*token.Token, string) {
	// level is a mapping or list that is open: one in brackets, or a block at a column.
	type level struct {
		column int // 0: in brackets
		keys   int
	}
	var open []level
	flow := 0 // levels in brackets
	run := 0  // indicators in a row without a value between them
	// enter pops the blocks that end where something begins at a column, and opens the one at that column.
	enter := func(column int) {
		if flow > 0 {
			return
		}
		for len(open) > 0 && open[len(open)-1].column > column {
			open = open[:len(open)-1]
		}
		if len(open) == 0 || open[len(open)-1].column < column {
			open = append(open, level{column: column})
		}
	}
	for i, t := range tokens {
		switch t.Type {
		case token.MappingStartType, token.SequenceStartType:
			open, run = append(open, level{}), 0
			flow++
		case token.MappingEndType, token.SequenceEndType:
			if run = 0; flow > 0 {
				open = open[:len(open)-1]
				flow--
			}
		case token.SequenceEntryType, token.MappingKeyType:
			enter(t.Position.Column)
			run = 0
		case token.AnchorType, token.AliasType, token.TagType:
			run++
		case token.MappingValueType:
			run++
			if i > 0 { // the key begins the mapping
				enter(tokens[i-1].Position.Column)
			}
			if len(open) > 0 {
				if open[len(open)-1].keys++; open[len(open)-1].keys > maxKeys {
					return t, fmt.Sprintf("the mapping has more than %d keys; allowed: at most that", maxKeys)
				}
			}
		case token.CollectEntryType:
			run = 0
		case token.CommentType:
		default:
			// A value ends a row of indicators, but the name of an anchor or alias does not; nor do the
			// scalars of a: b: c: in brackets, which nest.
			if i > 0 && flow == 0 && tokens[i-1].Type != token.AnchorType && tokens[i-1].Type != token.AliasType {
				run = 0
			}
		}
		if len(open)+run > maxNesting {
			return t, fmt.Sprintf("lists and mappings are nested more than %d deep; allowed: at most that", maxNesting)
		}
	}
	return nil, ""
}
