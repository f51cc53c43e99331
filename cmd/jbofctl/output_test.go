package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"jbofd/internal/admin"
)

// TestAnswersNameOneThingAlike: scripts find a subsystem's NQN, and a size, under one key in all answers.
func TestAnswersNameOneThingAlike(t *testing.T) {
	s := fake(t)
	for _, line := range []string{"ssd show ssd0", "subsystem list", "namespace list", "connection list", "swap list",
		"cluster status"} {
		_, j, _ := run(t, append(strings.Fields(line), "--socket", s, "-o", "json")...)
		if !strings.Contains(j, `"subNQN"`) {
			t.Errorf("%s: no subNQN in\n%s", line, j)
		}
		for _, key := range []string{"nqn", "blockSize", "drive"} {
			if strings.Contains(j, `"`+key+`":`) {
				t.Errorf("%s: the key %s is another name of subNQN, blockSizeBytes or uuid in\n%s", line, key, j)
			}
		}
	}
}

func TestJSONAndYAMLSayTheSameAndCarryTheVersion(t *testing.T) {
	s := fake(t)
	for _, line := range []string{"status", "ssd list", "ssd show ssd0", "ssd smart-log ssd0", "subsystem list",
		"namespace list", "connection list", "tenant list", "swap list", "cluster status", "cluster ring",
		"cluster chains", "cluster drain n1", "config reload", "reload --dry-run"} {
		args := append(strings.Fields(line), "--socket", s, "-o")
		_, j, _ := run(t, append(args, "json")...)
		_, y, _ := run(t, append(args, "yaml")...)
		var fromJSON any
		if err := json.Unmarshal([]byte(j), &fromJSON); err != nil {
			t.Errorf("%s: %v in %s", line, err, j)
			continue
		}
		if v, _ := fromJSON.(map[string]any)["apiVersion"].(string); v != admin.Version {
			t.Errorf("%s: apiVersion is %q, want %q", line, v, admin.Version)
		}
		var fromYAML any
		if err := yaml.Unmarshal([]byte(y), &fromYAML); err != nil {
			t.Errorf("%s: %v in %s", line, err, y)
		}
		again, err := json.Marshal(fromYAML)
		if err != nil {
			t.Fatal(err)
		}
		want, err := json.Marshal(fromJSON)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(again, want) {
			t.Errorf("%s: YAML says\n%s\nJSON says\n%s", line, again, want)
		}
	}
}
